"""What may be deleted after a retraining, and whether there is space for the next one."""
