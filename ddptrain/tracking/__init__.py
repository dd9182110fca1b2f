"""Trackers: further places for metrics besides the run directory. Each works in a thread of the rank, and may fail."""
