"""The files of a checkpoint: tensors as safetensors, the rest as a state that loads without executing a pickle."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddptrain.file_ops import sha256, write_all
from ddptrain.protocol.events import StagedFile
from ddptrain.protocol.tensor_slices import MODEL, OPTIMIZER, is_sharded_checkpoint, shard_file, slice_metadata
from ddptrain.rank.checkpoint.snapshot import Snapshot, is_sharded, unwrapped
from ddptrain.rank.checkpoint.weights import MODEL_FILE, SAFETENSORS_TYPES, read_weights, with_module_versions

TENSORS_FILE = "tensors.safetensors"  # large tensors of the state; state.pt refers to them
STATE_FILE = "state.pt"
_CHUNK_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
_REFERENCE = "ddptrain.tensor"  # {_REFERENCE: name} in state.pt refers to the tensor of that name in TENSORS_FILE


def write(folder: Path, snapshot: Snapshot, rank: int = 0) -> tuple[StagedFile, ...]:
    """Write the weights, or a rank's slices if it has any, into a new folder; return the files and their hashes.

    Raises OSError if a write fails.
    """
    folder.mkdir(parents=True)
    if (places := snapshot.places) is None:
        return (_write_file(folder / MODEL_FILE, _safetensors(snapshot.weights, snapshot.tied)),)
    files = []
    for kind, tensors, tied in (MODEL, snapshot.weights, snapshot.tied), (OPTIMIZER, snapshot.optimizer, {}):
        if tensors or (kind == MODEL and rank == 0):
            metadata = slice_metadata({name: places[name] for name in tensors}, tied)
            files.append(_write_file(folder / shard_file(kind, rank), _safetensors(tensors, metadata)))
    return tuple(files)


def write_state(folder: Path, state: Mapping[str, Any], ranks: list[Any] | None = None) -> tuple[StagedFile, ...]:
    """Write everything but the weights, with the states of all ranks. Raises OSError if a write fails."""
    large: dict[str, Tensor] = {}
    small = map_values(state, Tensor, lambda tensor: _refer_if_large(tensor, large))
    file = io.BytesIO()
    torch.save({**small, "ranks": ranks}, file)
    files = [_write_file(folder / TENSORS_FILE, _safetensors(large, {}))] if large else []
    return *files, _write_file(folder / STATE_FILE, [file.getbuffer()])


def read(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, Any]:
    """Load a checkpoint into `model` and `optimizer`; return its state: step, epoch, metrics, extra and ranks.

    Raises RuntimeError, which lists missing and unexpected names, if the weights don't fit the model.
    """
    state = read_state(folder)
    bare, sharded = unwrapped(model), is_sharded(model)
    if sharded or is_sharded_checkpoint(folder):
        from ddptrain.rank.checkpoint import shards  # its imports take time
    weights = shards.own_weights(folder, bare) if sharded else read_weights(folder, device)
    bare.load_state_dict(with_module_versions(bare, {**weights, **(state.pop("model", None) or {})}))
    if optimizer is not None and state["optimizer"] is not None:
        if sharded or is_sharded_checkpoint(folder):
            shards.load_optimizer(folder, state["optimizer"], bare, optimizer)
        else:
            optimizer.load_state_dict(state["optimizer"])
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """Load everything but the weights, on the CPU."""
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    large = load_file(folder / TENSORS_FILE) if (folder / TENSORS_FILE).exists() else {}
    restored: dict[str, Any] = map_values(state, dict, lambda item: _resolved(item, large))
    return restored


def _refer_if_large(tensor: Tensor, large: dict[str, Tensor]) -> Any:
    if (
        tensor.numel() * tensor.element_size() < _LARGE_BYTES
        or tensor.dtype not in SAFETENSORS_TYPES
        or tensor.is_sparse
    ):
        return tensor
    name = str(len(large))
    large[name] = tensor
    return {_REFERENCE: name}


def _resolved(item: dict[Any, Any], large: Mapping[str, Tensor]) -> Any:
    return large[item[_REFERENCE]] if item.keys() == {_REFERENCE} else item


def map_values(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each instance of `kind` in nested containers, to items before their container."""
    if type(value) in (list, tuple, set):
        value = type(value)(map_values(item, kind, change) for item in value)
    elif isinstance(value, dict):
        value = type(value)((key, map_values(item, kind, change)) for key, item in value.items())
    return change(value) if isinstance(value, kind) else value


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """Return the bytes of a safetensors file: the header with its length, and the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide types first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *(_octets(tensors[name]) for name in names)]


def _octets(tensor: Tensor) -> memoryview:
    octets: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(octets)


def _write_file(path: Path, pieces: Sequence[memoryview]) -> StagedFile:
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


def capture_random(device: torch.device) -> dict[str, Any]:
    """Return the states of Python, NumPy and torch, as tensors and numbers that load without executing a pickle."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a captured state; the state of a GPU stays if none was captured."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed_random(state: Mapping[str, Any], rank: int) -> None:
    """Set random states that depend only on `state` and the rank, for a checkpoint without the state of this rank."""
    digest = sha256(state["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:7], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
