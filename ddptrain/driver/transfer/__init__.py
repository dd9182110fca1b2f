"""What travels between driver and workers: code, inputs, logs, checkpoints and files."""
