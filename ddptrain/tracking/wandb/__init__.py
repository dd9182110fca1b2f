"""The part of the Weights & Biases support that needs neither a run directory nor a cluster.

The driver and results import `credentials` and `wandb_folders`, which do not import wandb. The other modules import it,
and are imported in the tracker's thread.
"""
