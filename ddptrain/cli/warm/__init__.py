"""Warm commands: a process of a local cluster that has imported the driver, and forks it for its user's commands."""
