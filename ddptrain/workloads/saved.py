"""What a finished (or running) run of a built-in workload left on disk for those who use its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from ddptrain.config.wording import shown
from ddptrain.errors import UsageError
from ddptrain.workloads.versions import versioned

Model = TypeVar("Model", bound=torch.nn.Module)


def load_saved(run_dir: Path, workload: str, command: str, build: Callable[[Any], Model]) -> tuple[Model, str]:
    """The model of a run's best checkpoint, or else the latest, ready to predict on the CPU; and its folder's name.

    `build` makes a model from the `model_config` that training saved, which may be anything: it raises ValueError,
    or its like, for what is none. No pickle is executed. `command` is who asks, for messages.

    Raises:
        UsageError: the run is of another workload, or has no checkpoint that can be read.
    """
    check_workload(run_dir, workload, command)
    folder = checkpoint_folder(run_dir)
    try:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        weights = load_file(folder / "model.safetensors")
        model = build(state["extra"]["model_config"])
        model.load_state_dict(versioned(model, weights))
    except UsageError:
        raise
    except Exception as error:  # a damaged file shows as any of a dozen kinds
        raise UsageError(
            f"can't read the checkpoint {folder}: {type(error).__name__}: {shown(' '.join(str(error).split()), 300)}; "
            f"is it of a run of {workload}, and whole?"
        ) from error
    return model.eval(), folder.name


def check_workload(run_dir: Path, workload: str, command: str) -> None:
    """Refuse a folder that holds no run of the workload. Raises UsageError."""
    path = run_dir / "run.json"
    try:
        run: Any = json.loads(path.read_text(encoding="utf-8"))
        found = run["workload"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run: {path}: {type(error).__name__}: {error}") from error
    if found != workload:
        raise UsageError(f"{run_dir.name} is a run of the workload {found!r}; {command} needs one of {workload}")


def checkpoint_folder(run_dir: Path) -> Path:
    """Where `best`, or else `latest`, points to; both hold the name of a folder beside them. Raises UsageError."""
    checkpoints = run_dir / "checkpoints"
    for pointer in ("best", "latest"):
        try:
            name = (checkpoints / pointer).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if name in {"", ".", ".."} or Path(name).name != name or "\\" in name:
            raise UsageError(f"{checkpoints / pointer} holds {name!r}, which is not the name of a folder in it")
        if (checkpoints / name).is_dir():
            return checkpoints / name
    raise UsageError(f"{run_dir.name} has no checkpoint yet (none in {checkpoints}): train it for an epoch first")
