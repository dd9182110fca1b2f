"""Sections of the YAML file that have a file of their own: cluster, tracking, retrain, sweep."""
