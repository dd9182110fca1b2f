"""Sweeps: `ddptrain sweep` runs many trials of a configuration on one cluster, and finds the best values."""
