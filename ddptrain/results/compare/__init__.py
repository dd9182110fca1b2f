"""Compares runs: configuration, code, data, versions, metrics and curves."""
