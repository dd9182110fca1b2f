"""Deletes runs that a policy does not keep."""
