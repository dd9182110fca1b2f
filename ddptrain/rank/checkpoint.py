"""A checkpoint's files: weights as safetensors, the rest as a state that loads without executing a pickle."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from ddptrain.events import StagedFile

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.pt"
_CHUNK_BYTES = 1 << 20


def write(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    step: int,
    epoch: float | None,
    metrics: Mapping[str, float],
    more: Mapping[str, Any],
) -> tuple[StagedFile, ...]:
    """Write the weights and the state into a new `folder`; return the files with their sizes and hashes.

    Raises:
        TypeError: `more` holds something that would only load by executing a pickle.
    """
    folder.mkdir(parents=True)
    save_model(_unwrapped(model), str(folder / MODEL_FILE))
    state = {
        "step": int(step),
        "epoch": epoch,
        "metrics": dict(metrics),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "extra": {name: _state_of(value) for name, value in more.items()},
    }
    _save_state(state, folder / STATE_FILE)
    return tuple(_staged(folder / name) for name in (MODEL_FILE, STATE_FILE))


def read(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, Any]:
    """Load a checkpoint into `model` and `optimizer`; return its state: step, epoch, metrics and extra.

    Raises:
        RuntimeError: the weights don't fit the model; missing and unexpected names are told.
    """
    load_model(_unwrapped(model), folder / MODEL_FILE, device=str(device))
    state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
    if optimizer is not None and state["optimizer"] is not None:
        optimizer.load_state_dict(state["optimizer"])
    return state


def hash_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _staged(path: Path) -> StagedFile:
    size, digest = hash_file(path)
    return StagedFile(path.name, size, digest)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _save_state(state: dict[str, Any], path: Path) -> None:
    """Save, and prove that it loads with weights_only: better to fail now than when it is needed."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise TypeError(
            "checkpoint state must load without executing a pickle: give numbers, text, lists, dictionaries, tensors, "
            f"or objects with state_dict() ({error})"
        ) from error
