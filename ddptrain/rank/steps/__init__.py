"""Measures a rank's own time in each training step, without the time in which it waits for other ranks."""
