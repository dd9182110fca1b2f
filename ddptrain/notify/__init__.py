"""Messages about unattended runs: notifications and the heartbeat of a check server."""
