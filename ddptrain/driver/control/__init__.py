"""Signals, stopping, and drivers in the background."""
