"""The driver's part of tracking: setup, credentials, and sending of offline runs."""
