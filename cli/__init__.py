"""The command line `kimi-k3`. Imports nothing: the commands of every package import `common`, and `main` them."""
