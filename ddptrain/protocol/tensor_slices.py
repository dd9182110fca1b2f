"""Saved tensors, whole or in slices: reads safetensors files without torch, and never executes a pickle.

A checkpoint of a model that is on one rank has the file model.safetensors. Of a sharded model, each rank writes its
slices into model.rank-<r>.safetensors and optimizer.rank-<r>.safetensors. The header of such a file has, for each
slice, the shape of the whole tensor and the slice's offset in it. There is no separate index of the slices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

MODEL, OPTIMIZER = "model", "optimizer"  # the first part of the names of shard files
INDEX_FILE = "model.safetensors.index.json"  # for several files: the file of each tensor
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_FORMAT = "ddptrain.slices"  # key of the header's metadata: JSON with [whole shape, offset] by name
_TIED = "ddptrain.tied"  # key of the header's metadata: JSON with further names of tensors (name -> the saved name)
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # whatever odd JSON causes
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library

Place = tuple[tuple[int, ...], tuple[int, ...]]  # the shape of the whole tensor, and the offset of a slice in it


class SlicesError(ValueError):
    """Files of a checkpoint are damaged, or slices are missing."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor in a file: `start` is the position of its first byte, `offset` its place in the tensor."""

    file: Path
    start: int
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that is saved in one or more slices, which cover all of it. `dtype` is a name of safetensors, as F32."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def n_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, offset: Sequence[int] | None = None, size: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
        """Read a part of the tensor, or all of it, as raw items (numpy's void type).

        Raises SlicesError if values are missing in the files, OSError if a file cannot be read.
        """
        first = tuple(offset) if offset is not None else (0,) * len(self.shape)
        wanted = tuple(size) if size is not None else self.shape
        kind = np.dtype(f"V{ITEM_BYTES[self.dtype]}")
        result = np.empty(wanted, kind)
        copied = 0
        for part in self.slices:
            begin = [max(a, b) for a, b in zip(first, part.offset, strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(first, wanted, part.offset, part.size, strict=True)]
            if any(b >= e for b, e in zip(begin, end, strict=True)) or not math.prod(part.size):
                continue
            target, source = (
                tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, origin, strict=True))
                for origin in (first, part.offset)
            )
            result[target] = np.memmap(part.file, kind, "r", part.start, part.size)[source]
            copied += math.prod(e - b for b, e in zip(begin, end, strict=True))
        if copied != result.size:
            raise SlicesError(f"{copied} of {result.size} values at offset {list(first)} are in the files")
        return result


def shard_file(kind: str, rank: int) -> str:
    """Return the name of the file with a rank's slices of the model or of the optimizer's state."""
    return f"{kind}.rank-{rank}.safetensors"


def slice_metadata(places: Mapping[str, Place], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a shard file's header."""
    return {_FORMAT: json.dumps(places, separators=(",", ":")), _TIED: json.dumps(tied, separators=(",", ":"))}


def is_sharded_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint's folder has the slices of a sharded model. Rank 0 always writes a file."""
    return (folder / shard_file(MODEL, 0)).is_file()


def saved_model(folder: Path) -> tuple[dict[str, SavedTensor], dict[str, str]]:
    """Return the weights in a folder by name, and further names of tied weights (name -> name of the weight).

    The folder has model.safetensors, the files of model.safetensors.index.json, or the files of ranks.

    Raises SlicesError if files are damaged or slices are missing; OSError if a file is missing or cannot be read.
    """
    if is_sharded_checkpoint(folder):
        return read_shards(folder, MODEL)
    files = [folder / "model.safetensors"]
    if (folder / INDEX_FILE).is_file():
        files = [folder / name for name in _indexed(folder / INDEX_FILE)]
    tensors: dict[str, SavedTensor] = {}
    tied: dict[str, str] = {}
    for file in files:
        slices, metadata = _slices(file)
        tensors |= {name: SavedTensor(dtype, part.size, (part,)) for name, (dtype, part) in slices.items()}
        tied |= metadata
    return tensors, {name: kept for name, kept in tied.items() if kept in tensors}


def read_shards(folder: Path, kind: str) -> tuple[dict[str, SavedTensor], dict[str, str]]:
    """Return the tensors in the shard files of one kind, and names of tied ones. Raises SlicesError, OSError."""
    tensors: dict[str, SavedTensor] = {}
    tied: dict[str, str] = {}
    for file in sorted(folder.glob(f"{kind}.rank-*.safetensors")):
        slices, metadata = _slices(file)
        try:
            places, more = json.loads(metadata[_FORMAT]), json.loads(metadata[_TIED])
            tied.update({str(name): str(kept) for name, kept in more.items()})
            for name, (dtype, part) in slices.items():
                shape, offset = (_sizes(numbers) for numbers in places[name])
                if any(at + n > whole for at, n, whole in zip(offset, part.size, shape, strict=True)):
                    raise ValueError(f"the slice of {name} is not inside of the tensor")
                known = tensors.get(name, SavedTensor(dtype, shape, ()))
                if (known.dtype, known.shape) != (dtype, shape):
                    raise ValueError(f"slices of {name} are of different types, or of tensors of different shapes")
                tensors[name] = replace(known, slices=(*known.slices, replace(part, offset=offset)))
        except _DAMAGED as error:
            raise SlicesError(f"{file} is damaged: {error}") from error
    for name, tensor in tensors.items():
        present, wanted = sum(math.prod(part.size) for part in tensor.slices), math.prod(tensor.shape)
        if present != wanted:
            raise SlicesError(f"{present} of the {wanted} values of {name} are in the files of the ranks")
    return tensors, {name: kept for name, kept in tied.items() if kept in tensors}


def _slices(file: Path) -> tuple[dict[str, tuple[str, Slice]], dict[str, str]]:
    """Return the type and the slice of each tensor in a safetensors file, and the header's metadata."""
    total = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, total - 8):
            raise SlicesError(f"{file} is damaged: it is not a safetensors file")
        text = opened.read(length)
    try:
        header = json.loads(text)
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        return {name: _entry(file, entry, 8 + length, total) for name, entry in header.items()}, metadata
    except _DAMAGED as error:
        raise SlicesError(f"{file} is damaged: its header is not that of a safetensors file: {error}") from error


def _entry(file: Path, entry: Mapping[str, Any], data_at: int, total: int) -> tuple[str, Slice]:
    dtype, size, (begin, end) = str(entry["dtype"]), _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if end - begin != math.prod(size) * ITEM_BYTES[dtype] or data_at + end > total:
        raise ValueError("the size of a tensor is not that of its data")
    return dtype, Slice(file, data_at + begin, (0,) * len(size), size)


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape has a value that is not a size")
    return tuple(numbers)


def _indexed(index: Path) -> list[str]:
    """Return the files that an index names. Raises SlicesError for a path that is not a plain file name."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except _DAMAGED as error:
        raise SlicesError(f"{index} is damaged: {error}") from error
    if bad := [name for name in names if name != Path(name).name or "\\" in name or name in ("", ".", "..")]:
        raise SlicesError(f"{index} names {bad[0]!r}, which is not a plain file name")
    return names
