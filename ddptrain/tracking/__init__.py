"""Where metrics go besides the run directory, from a rank's threads of their own: sinks that may fail."""
