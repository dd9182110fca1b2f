"""The part of the Weights & Biases support that needs neither a run directory nor a cluster.

The driver and results import `credentials`, `wandb_folders` and `sync_command`, which do not import wandb. The other
modules import it, and are imported in the tracker's thread or run in a process of their own.
"""
