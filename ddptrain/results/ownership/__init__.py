"""Which driver has a run: claim, lock and heartbeat."""
