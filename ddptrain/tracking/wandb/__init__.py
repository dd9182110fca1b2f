"""The part of the Weights & Biases support that needs neither a run directory nor a cluster.

The driver and results import `credentials`, `wandb_folders`, `sync_command` and `transaction_log`, which do not import
wandb. The other modules import it, and are imported in the tracker's thread.
"""
