"""Writes the metrics of runs in formats of other tools."""
