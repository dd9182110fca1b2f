"""The model of a run of a built-in workload: finds its checkpoint, verifies it, and loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular
from ddptrain.protocol.tensor_slices import is_sharded_checkpoint
from ddptrain.rank.checkpoint.weights import read_weights, with_module_versions

Model = TypeVar("Model", bound=torch.nn.Module)


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


def load_checkpoint(folder: Path, workload: str, build: Callable[[Any], Model]) -> Model:
    """Return the model of a checkpoint's folder, in evaluation mode on the CPU. No pickle is executed.

    `build` makes a model from the saved `model_config`, which is not trusted: it raises ValueError or a similar error
    for an invalid one. The model may be on the device meta. Raises UsageError if the checkpoint is not readable.
    """
    _require_intact(folder)
    try:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        weights = read_weights(folder)
        model = build(state["extra"]["model_config"])
        model.load_state_dict(with_module_versions(model, weights), assign=True)
    except UsageError:
        raise
    except Exception as error:  # damaged files raise arbitrary errors
        raise UsageError(
            f"can't read the checkpoint {folder}: {type(error).__name__}: "
            f"{shorten(' '.join(str(error).split()), 300)}; "
            f"is it a complete checkpoint of a run of {workload}?"
        ) from error
    return model.eval()


def _require_intact(folder: Path) -> None:
    """Compare the files with the manifest: a changed bit would change the model unseen. Raises UsageError."""
    from ddptrain.results.checkpoints.verification import verify  # ranks need none of it
    from ddptrain.results.errors import CheckpointDamaged

    if not (folder / "checkpoint.json").exists():
        return
    try:
        verify(folder)
    except CheckpointDamaged as error:
        raise UsageError(
            f"the checkpoint {folder} is damaged: {error}; restore the file from a copy, "
            "or continue the run with ddptrain train --resume, which skips damaged checkpoints"
        ) from error


def check_workload(run_dir: Path, workload: str, command: str) -> None:
    """Check that a folder has a run of the workload. Raises UsageError."""
    path = run_dir / "run.json"
    try:
        run: Any = json.loads(read_regular(path))
        actual = run["workload"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run: {path}: {type(error).__name__}: {error}") from error
    if actual != workload:
        raise UsageError(f"{run_dir.name} is a run of the workload {actual!r}; {command} needs one of {workload}")


def checkpoint_folder(run_dir: Path) -> Path:
    """Return the folder of the checkpoint that `best`, or else `latest`, names. Raises UsageError.

    A folder that `ddptrain results export --format safetensors` has written is itself the checkpoint.
    """
    checkpoints = run_dir / "checkpoints"
    if (run_dir / "checkpoint.json").is_file() and not checkpoints.exists():
        return run_dir
    for pointer in ("best", "latest"):
        try:
            name = read_regular(checkpoints / pointer).decode().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if name in {"", ".", ".."} or Path(name).name != name or "\\" in name:
            raise UsageError(f"{checkpoints / pointer} contains {name!r}, which is not the name of a folder in it")
        if (checkpoints / name).is_dir():
            return checkpoints / name
    raise UsageError(f"{run_dir.name} has no checkpoint yet (none in {checkpoints}): train it for an epoch first")
