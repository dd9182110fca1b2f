"""The files of a checkpoint: tensors as safetensors, the rest as a state that loads without executing a pickle.

safetensors and torch.save do not write the files. Here they are written in large pieces, which release the GIL for the
training thread, are hashed at the same time, and raise the OSError of the disk.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ddptrain.file_ops import sha256, write_all
from ddptrain.protocol.events import StagedFile
from ddptrain.rank.checkpoint.snapshot import SAFETENSORS_TYPES, Snapshot, unwrapped
from ddptrain.workloads.saved_model import with_module_versions

MODEL_FILE = "model.safetensors"
TENSORS_FILE = "tensors.safetensors"  # large tensors of the state; state.pt refers to them
STATE_FILE = "state.pt"
_CHUNK_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
_REFERENCE = "ddptrain.tensor"  # {_REFERENCE: name} in state.pt refers to the tensor of that name in TENSORS_FILE


def write(folder: Path, snapshot: Snapshot, ranks: list[Any] | None = None) -> tuple[StagedFile, ...]:
    """Write a snapshot and the states of all ranks into a new folder; return the files and their hashes.

    Raises OSError if a write fails.
    """
    folder.mkdir(parents=True)
    large: dict[str, Tensor] = {}
    state = _map(snapshot.state, Tensor, lambda tensor: _set_aside(tensor, large))
    file = io.BytesIO()
    torch.save({**state, "ranks": ranks}, file)
    files = [_write_file(folder / MODEL_FILE, _safetensors(snapshot.weights, snapshot.tied))]
    if large:
        files.append(_write_file(folder / TENSORS_FILE, _safetensors(large, {})))
    files.append(_write_file(folder / STATE_FILE, [file.getbuffer()]))
    return tuple(files)


def read(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, Any]:
    """Load a checkpoint into `model` and `optimizer`; return its state: step, epoch, metrics, extra and ranks.

    Raises RuntimeError, which lists missing and unexpected names, if the weights don't fit the model.
    """
    state = read_state(folder)
    weights = read_weights(folder, device)
    bare = unwrapped(model)
    bare.load_state_dict(with_module_versions(bare, {**weights, **(state.pop("model", None) or {})}))
    if optimizer is not None and state["optimizer"] is not None:
        optimizer.load_state_dict(state["optimizer"])
    return state


def read_weights(folder: Path, device: str | torch.device) -> dict[str, Any]:
    """Load the weights of a checkpoint by name; shared weights have all of their names."""
    weights: dict[str, Any] = load_file(folder / MODEL_FILE, device=str(device))
    with safe_open(folder / MODEL_FILE, framework="pt") as file:
        tied = file.metadata() or {}
    return weights | {name: weights[kept] for name, kept in tied.items() if kept in weights}


def read_state(folder: Path) -> dict[str, Any]:
    """Load everything but the weights, on the CPU."""
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    large = load_file(folder / TENSORS_FILE) if (folder / TENSORS_FILE).exists() else {}
    found: dict[str, Any] = _map(state, dict, lambda item: _fetched(item, large))
    return found


def _set_aside(tensor: Tensor, large: dict[str, Tensor]) -> Any:
    if (
        tensor.numel() * tensor.element_size() < _LARGE_BYTES
        or tensor.dtype not in SAFETENSORS_TYPES
        or tensor.is_sparse
    ):
        return tensor
    name = str(len(large))
    large[name] = tensor
    return {_REFERENCE: name}


def _fetched(item: dict[Any, Any], large: Mapping[str, Tensor]) -> Any:
    return large[item[_REFERENCE]] if item.keys() == {_REFERENCE} else item


def _map(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each instance of `kind` in nested containers; items are changed before their container."""
    if type(value) in (list, tuple, set):
        value = type(value)(_map(item, kind, change) for item in value)
    elif isinstance(value, dict):
        value = type(value)((key, _map(item, kind, change)) for key, item in value.items())
    return change(value) if isinstance(value, kind) else value


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterable[memoryview]:
    """Yield the bytes of a safetensors file: the header's length, the header, and the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide types first: so each tensor is aligned to the size of its elements.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        octets: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        yield memoryview(octets)


def _write_file(path: Path, pieces: Iterable[memoryview]) -> StagedFile:
    """Write a file and compute its hash; the file is durable when this returns."""
    digest, size = sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                write_all(descriptor, chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return StagedFile(path.name, size, digest.hexdigest())
