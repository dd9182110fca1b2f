"""What a finished (or running) run left on disk for generate: the model, and the names of its list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.alphabet import normalise
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig


def load_model(run_dir: Path) -> tuple[CharacterModel, str]:
    """The model of a run's best checkpoint, or else the latest, ready to predict on the CPU; and its folder's name.

    Raises:
        UsageError: the run is of another workload, or has no checkpoint that can be read.
    """
    _check_workload(run_dir)
    folder = _checkpoint_folder(run_dir)
    try:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        weights = load_file(folder / "model.safetensors")
        model = CharacterModel(ModelConfig.restored(state["extra"]["model_config"]))
        model.load_state_dict(weights)
    except UsageError:
        raise
    except Exception as error:  # a damaged file shows as any of a dozen kinds
        raise UsageError(
            f"can't read the checkpoint {folder}: {type(error).__name__}: {error}; is it of a pet-name run, and whole?"
        ) from error
    return model.eval(), folder.name


def known_names(run_dir: Path) -> set[str]:
    """Every name of the list that the run was given, trained on or held out, in normal form.

    Raises:
        UsageError: the run did not leave them.
    """
    path = run_dir / "artifacts" / "names.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {normalise(name) for names in (saved["train"], saved["held_out"]) for name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"can't tell which names the run was trained on: {path}: {type(error).__name__}: {error}; "
            "--keep-known does without"
        ) from error


def _check_workload(run_dir: Path) -> None:
    path = run_dir / "run.json"
    try:
        run: Any = json.loads(path.read_text(encoding="utf-8"))
        workload = run["workload"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run: {path}: {type(error).__name__}: {error}") from error
    if workload != "petnames":
        raise UsageError(f"{run_dir.name} is a run of the workload {workload!r}; generate needs one of petnames")


def _checkpoint_folder(run_dir: Path) -> Path:
    """Where `best`, or else `latest`, points to; both hold the name of a folder beside them."""
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
