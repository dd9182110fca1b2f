"""Selects, sorts and tabulates runs by expressions such as val/loss < 2.3."""
