"""The program of the ranks that measure a cluster."""
