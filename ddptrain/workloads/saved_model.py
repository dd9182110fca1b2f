"""Loads the model of a run of a built-in workload from its checkpoint, also for use in other programs."""

from __future__ import annotations

from pathlib import Path

import torch

from ddptrain.errors import UsageError
from ddptrain.protocol.tensor_slices import is_sharded_checkpoint
from ddptrain.workloads.checkpoint import checkpoint_folder


def load_trained(run_dir: Path, workload: str) -> torch.nn.Module:
    """Return the model of the best checkpoint, or else the latest, on the CPU and in eval mode.

    run_dir: a run directory, or a version of a model, which is laid out like one.

    Raises UsageError if the workload is not built in, or the checkpoint cannot be read.
    """
    if workload == "petnames":
        from ddptrain.workloads.petnames.generate import load_model

        return load_model(run_dir)[0]
    if workload == "images":
        from ddptrain.workloads.images.model import load_model as load_classifier

        return load_classifier(run_dir).model
    folder = checkpoint_folder(run_dir)
    if is_sharded_checkpoint(folder):
        command = "`ddptrain results export --format safetensors`"
        how = f"write the weights of {folder} into one file with {command}, and load them"
    else:
        how = f"load the weights of {folder / 'model.safetensors'}"
    raise UsageError(f"only the code of {workload} can build its model: {how} there with safetensors.torch.load_file")
