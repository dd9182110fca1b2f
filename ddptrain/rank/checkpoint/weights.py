"""Reads a checkpoint: its weights as torch tensors, of one file, of several, or of the slices of ranks; its model."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular
from ddptrain.protocol.tensor_slices import SavedTensor, saved_model

MODEL_FILE = "model.safetensors"
# safetensors' names of types: https://huggingface.co/docs/safetensors
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}

Model = TypeVar("Model", bound=torch.nn.Module)


def read_weights(folder: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Load the weights of a checkpoint by name; shared weights have all of their names. No pickle is executed.

    Raises SlicesError if a slice of a sharded model is missing; OSError and SafetensorError if files can't be read.
    """
    if not (folder / MODEL_FILE).is_file():
        saved, tied = saved_model(folder)
        weights = {name: tensor_of(tensor).to(device) for name, tensor in saved.items()}
    else:
        weights = load_file(folder / MODEL_FILE, device=str(device))
        with safe_open(folder / MODEL_FILE, framework="pt") as file:
            tied = file.metadata() or {}
    return weights | {name: weights[kept] for name, kept in tied.items() if kept in weights}


def tensor_of(saved: SavedTensor, offset: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
    """Read a saved tensor, or the part of `size` at `offset`, on the CPU. Raises SlicesError, OSError."""
    items = saved.read(offset, size)
    octets = torch.from_numpy(items.reshape(-1).view(np.uint8)) if items.size else torch.empty(0, dtype=torch.uint8)
    return octets.view(_TYPES[saved.dtype]).reshape(items.shape)


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


def with_module_versions(model: torch.nn.Module, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The weights as load_state_dict needs them: with the versions of the model's modules, which files do not contain.

    Without them a module assumes its first version; some, such as torchvision's MNASNet, refuse that.
    """
    state = OrderedDict(weights)
    if versions := getattr(model.state_dict(), "_metadata", None):
        vars(state)["_metadata"] = versions
    return state


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
