"""Runs as text, charts and figures."""
