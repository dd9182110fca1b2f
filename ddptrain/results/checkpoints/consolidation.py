"""Writes the model of a checkpoint as one safetensors checkpoint, without torch: 64 MiB of a tensor at a time."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file, publish, sync_folder, write_atomic
from ddptrain.protocol.tensor_slices import INDEX_FILE, ITEM_BYTES, MODEL, OPTIMIZER, SavedTensor, saved_model
from ddptrain.results.checkpoints.verification import parse_manifest, verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.layout import MANIFEST

MAX_FILE_BYTES = 5_000_000_000  # the limit that the Hugging Face Hub uses
_CHUNK_BYTES = 64 << 20
_MODEL_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Consolidated:
    """What was written: the folder, the step, the files, and how many tensors of how many bytes the model has."""

    folder: Path
    step: int
    files: tuple[str, ...]
    tensors: int
    n_bytes: int


def consolidate(
    checkpoint: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES, more: Sequence[Path] = ()
) -> Consolidated:
    """Write the weights of a checkpoint and its other files, without optimizer state, into the new folder `target`.

    The checkpoint is compared with its manifest first. The folder appears complete or not at all. more: further files
    to copy into the folder.

    Raises CheckpointDamaged; UsageError if the folder exists, or cannot be written.
    """
    if os.path.lexists(target):
        raise UsageError(f"{target} exists: choose a new folder")
    verified = verify(checkpoint)
    try:
        tensors, tied = saved_model(checkpoint)
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"cannot read the weights of {checkpoint}: {error}") from error
    others = [name for name in verified.files if name != MANIFEST and not _holds_tensors(name)]
    incoming = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming.mkdir()
        names = _write_model(incoming, tensors, tied, max_file_bytes)
        for path in (*(checkpoint / name for name in others), *more):
            shutil.copyfile(path, incoming / path.name)
        (incoming / MANIFEST).write_bytes(_manifest(checkpoint, incoming, [*names, *others]))
        sync_folder(incoming)
        publish(incoming, target)
    except OSError as error:
        raise UsageError(f"can't write the checkpoint to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    return Consolidated(target, verified.step, (*names, *others, MANIFEST), len(tensors), n_bytes)


def _holds_tensors(name: str) -> bool:
    """Return whether a file of a checkpoint contains weights or optimizer state."""
    return name in (_MODEL_FILE, INDEX_FILE) or name.startswith((f"{MODEL}.rank-", f"{OPTIMIZER}.rank-"))


def split_tensors(tensors: Mapping[str, SavedTensor], max_file_bytes: int) -> list[list[str]]:
    """Divide the tensors among files of at most `max_file_bytes`; return their names, one list for each file.

    A larger tensor gets a file of its own.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name)):
        if files[-1] and size + tensors[name].n_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensors[name].n_bytes
    return files


def _write_model(
    folder: Path, tensors: Mapping[str, SavedTensor], tied: Mapping[str, str], max_file_bytes: int
) -> list[str]:
    """Write the weights into one file, or into several with an index; return the names of the files."""
    files = split_tensors(tensors, max_file_bytes)
    if len(files) == 1:
        _write_tensors(folder / _MODEL_FILE, {name: tensors[name] for name in files[0]}, tied)
        return [_MODEL_FILE]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tied_here = {name: kept for name, kept in tied.items() if kept in names}
        _write_tensors(folder / file, {name: tensors[name] for name in names}, tied_here)
        weight_map |= dict.fromkeys([*names, *tied_here], file)
    size = sum(tensor.n_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
    return [*dict.fromkeys(weight_map.values()), INDEX_FILE]


def _write_tensors(path: Path, tensors: Mapping[str, SavedTensor], tied: Mapping[str, str]) -> None:
    """Write a safetensors file; its metadata are the further names of tied weights (`tied`: further name -> name)."""
    header: dict[str, Any] = {"__metadata__": dict(tied)} if tied else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.n_bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for offset, size in row_blocks(tensor):
                file.write(tensor.read(offset, size).tobytes())
        file.flush()
        os.fsync(file.fileno())


def row_blocks(tensor: SavedTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of blocks of whole rows, in order. A block has at most 64 MiB, or is a single row."""
    if not tensor.shape:
        yield (), ()
        return
    rows, rest = tensor.shape[0], tensor.shape[1:]
    row_bytes = math.prod(rest) * ITEM_BYTES[tensor.dtype]
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for row in range(0, rows, step):
        yield (row, *(0 for _ in rest)), (min(step, rows - row), *rest)


def _manifest(checkpoint: Path, folder: Path, names: Sequence[str]) -> bytes:
    """Return the checkpoint's manifest, with the files of the new folder."""
    before = parse_manifest((checkpoint / MANIFEST).read_bytes())
    if before is None:
        raise CheckpointDamaged(f"{checkpoint / MANIFEST} has changed meanwhile")
    files = []
    for name in names:
        size_bytes, digest = hash_file(folder / name)
        files.append({"name": name, "size_bytes": size_bytes, "sha256": digest})
    return (json.dumps({**before, "files": files}, indent=2) + "\n").encode()
