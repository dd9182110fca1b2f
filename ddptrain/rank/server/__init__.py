"""The rank server, which forks ranks."""
