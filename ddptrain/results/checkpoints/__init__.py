"""Checkpoints in a run directory: adding, verifying, keeping, consolidating."""
