"""What runs in the scheduler of a cluster."""
