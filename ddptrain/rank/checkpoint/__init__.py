"""Saving and loading checkpoints in a rank."""
