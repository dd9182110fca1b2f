"""Which driver owns a run: claim, lock and heartbeat."""
