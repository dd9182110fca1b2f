"""Samples the use of a host, its ranks and its GPUs."""
