"""Where workers come from: one module for each backend."""
