"""The trained model of any built-in workload, for use in other programs."""

from __future__ import annotations

from pathlib import Path

import torch

from ddptrain.errors import UsageError
from ddptrain.workloads.saved_model import checkpoint_folder


def load_trained(run_dir: Path, workload: str) -> torch.nn.Module:
    """Return the model of the best checkpoint, or else the latest, on the CPU and in eval mode.

    run_dir: a run directory, or a version of a model, which is laid out like one.

    Raises UsageError if the workload is not built in, or the checkpoint cannot be read.
    """
    if workload == "petnames":
        from ddptrain.workloads.petnames.generate import load_model

        return load_model(run_dir)[0]
    if workload == "images":
        from ddptrain.workloads.images.model.saved_classifier import load_model as load_classifier

        return load_classifier(run_dir).model
    raise UsageError(
        f"only the code of {workload} can build its model: load the weights of "
        f"{checkpoint_folder(run_dir) / 'model.safetensors'} there with safetensors.torch.load_file"
    )
