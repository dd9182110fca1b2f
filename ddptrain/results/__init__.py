"""The run directory: the driver writes it, everyone reads it."""
