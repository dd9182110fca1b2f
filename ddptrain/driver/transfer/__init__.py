"""What is transferred between driver and workers: code, inputs, logs, checkpoints and files."""
