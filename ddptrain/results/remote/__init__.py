"""Runs in an object store."""
