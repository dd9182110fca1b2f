"""What went wrong: the root cause, hangs, restarts, and how a run ends."""
