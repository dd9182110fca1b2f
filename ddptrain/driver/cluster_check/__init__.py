"""Checks the hosts of a cluster: facts, measurements, and what is wrong with them."""
