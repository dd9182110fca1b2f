"""The driver's part of tracking: setup, and sending what W&B lacks."""
