"""What the commands of `kimi-k3` share, and `generate`. `__main__` of the package names all commands."""
