"""The command line `kimi-k3`. Imports nothing: each package's commands import `common`, and `main` imports them."""
