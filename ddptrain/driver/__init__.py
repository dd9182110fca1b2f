"""In the process that runs the command: place ranks, submit them, watch, collect, stop."""
