"""Copies the state of the training into host memory, so that training continues while the copy is written."""

from __future__ import annotations

import io
import mmap
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HUGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights by name, further names of shared weights (name -> name of the weight), and the rest as plain data."""

    weights: Mapping[str, Tensor]
    tied: Mapping[str, str]
    state: dict[str, Any]


class HostBuffers:
    """The memory of one snapshot, reused for the next; memory for tensors of a GPU is pinned."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._devices: set[torch.device] = set()

    def take(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
    ) -> Snapshot:
        """Copy the model, the optimizer and `state` (plain data, or objects with state_dict()).

        The previous snapshot must no longer be in use. The copies are complete when this returns.

        Raises TypeError if something would only load by executing a pickle.
        """
        self._used = 0
        weights, tied, others = self._weights(unwrapped(model).state_dict())
        plain = {name: self.plain(value) for name, value in state.items()}
        if others:
            plain["model"] = self.plain(others)
        plain["optimizer"] = self.plain(optimizer) if optimizer is not None else None
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(weights, tied, plain)

    def _weights(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        """Return each weight once, the names that share one, and what is no tensor (a module's extra state)."""
        weights: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        seen: dict[object, str] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            first = seen.setdefault(_place(value) or name, name)
            if first != name:
                tied[name] = first
            else:
                weights[name] = self._copy(value)
                if value.dtype not in SAFETENSORS_TYPES or value.layout is not torch.strided:
                    raise TypeError(f"the weight {name!r} can't be saved: {value.dtype}, {value.layout}")
        return weights, tied, {name: value for name, value in state.items() if not isinstance(value, Tensor)}

    def plain(self, value: Any) -> Any:
        """Return `value` with copies of everything that may change. Raises TypeError."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            return self._copy(value)
        if kind is dict or kind is OrderedDict:
            return kind((self.plain(key), self.plain(item)) for key, item in value.items())
        if kind is list or kind is tuple or kind is set:
            return kind(self.plain(item) for item in value)
        if isinstance(value, np.generic) and type(number := value.item()) in _ATOMS:
            return number
        if hasattr(value, "state_dict"):
            return self.plain(value.state_dict())
        return _proven(value)

    def _copy(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            return source.cpu().clone()
        buffer = self._buffer(source)
        buffer.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            self._devices.add(source.device)
        return buffer

    def _buffer(self, like: Tensor) -> Tensor:
        number = self._used
        self._used += 1
        if number == len(self._buffers):
            self._buffers.append(_host_memory(like))
        have = self._buffers[number]
        fits = have.shape == like.shape and have.dtype == like.dtype and (have.is_pinned() or not like.is_cuda)
        if not fits:
            self._buffers[number] = _host_memory(like)
        return self._buffers[number]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def plain_bytes(value: Any) -> bytes:
    """Encode `value` (plain data, or an object with state_dict()) for `from_bytes`. Raises TypeError."""
    file = io.BytesIO()
    torch.save(HostBuffers().plain(value), file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Decode the bytes of `plain_bytes`; nothing is executed."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _place(tensor: Tensor) -> object:
    """Return a key that two tensors share only if they are the same memory; None if that is unknown."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _host_memory(like: Tensor) -> Tensor:
    """Return an empty contiguous tensor of that shape and type. Large pages make the first copy into it faster."""
    size = like.numel() * like.element_size()
    if like.is_cuda or size < _HUGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    memory = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _proven(value: Any) -> Any:
    """Return a copy of another object if it loads with weights_only. It must fail now rather than at the resume."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the object's own code raises
        raise TypeError(
            "checkpoint state must load without executing a pickle: give numbers, text, lists, dictionaries, tensors, "
            f"or objects with state_dict(), not {type(value).__qualname__} ({error})"
        ) from error
