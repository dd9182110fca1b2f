"""Checks of this machine: `ddptrain doctor`."""
