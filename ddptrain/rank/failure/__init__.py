"""How a rank reports its failures: events from exceptions, tracebacks, and the stacks of its threads."""
