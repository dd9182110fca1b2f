"""Copies the state of the training into host memory. Training continues while the copy is written."""

from __future__ import annotations

import io
import mmap
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddptrain.errors import one_line
from ddptrain.protocol.tensor_slices import Place
from ddptrain.rank.checkpoint.weights import SAFETENSORS_TYPES
from ddptrain.sanitize import sanitized

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HUGE_BYTES = 4 << 20
_COPY_THREADS = 4  # one thread does not use all of the memory's bandwidth


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights by name, further names of tied weights (name -> name of the weight), and the rest as plain data.

    places: of a sharded model, whose `weights` are this rank's slices, the place of each slice; None for a whole model.
    optimizer: this rank's slices of the optimizer's state, named <weight>/<name>; that of a whole model is in `state`.
    """

    weights: Mapping[str, Tensor]
    tied: Mapping[str, str]
    state: dict[str, Any]
    places: Mapping[str, Place] | None
    optimizer: Mapping[str, Tensor]


class HostBuffers:
    """The memory for one snapshot, reused for the next one; memory for tensors of a GPU is pinned."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._devices: set[torch.device] = set()
        self._to_copy: list[tuple[Tensor, Tensor]] = []  # (target, source): large tensors of the CPU

    def take(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
    ) -> Snapshot:
        """Copy the model, the optimizer and `state` (plain data, or objects with state_dict()).

        The previous snapshot must no longer be in use. The copies are complete when this returns.

        Raises TypeError if a value could only be loaded by executing a pickle, or a safetensors file cannot hold it.
        """
        self._used = 0
        self._to_copy.clear()
        bare, settings = unwrapped(model), optimizer
        weights: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        others: dict[str, Any] = {}
        of_optimizer: dict[str, Tensor] = {}
        places: dict[str, Place] | None = {} if is_sharded(model) else None
        names_by_memory: dict[object, str] = {}
        for name, value in bare.state_dict().items():
            if not isinstance(value, Tensor):
                others[name] = value
            elif (first := names_by_memory.setdefault(memory_of(value) or name, name)) != name:
                tied[name] = first
            else:
                self._add(name, f"the weight {name!r}", value, weights, places)
        if places is not None and optimizer is not None:
            from ddptrain.rank.checkpoint.shards import optimizer_state

            values, settings = optimizer_state(bare, optimizer)  # type: ignore[assignment]  # has no state_dict()
            for name, value in values.items():
                self._add(name, f"the optimizer's {name!r}", value, of_optimizer, places)
        plain = {name: self.named(name, value) for name, value in state.items()}
        if others:
            plain["model"] = self.named("model", others)
        plain["optimizer"] = self.named("optimizer", settings)
        self.complete()
        return Snapshot(weights, tied, plain, places, of_optimizer)

    def _add(
        self, name: str, what: str, tensor: Tensor, copies: dict[str, Tensor], places: dict[str, Place] | None
    ) -> None:
        """Copy a tensor; or, if there are places, the slice that this rank saves, if it saves one."""
        if tensor.dtype not in SAFETENSORS_TYPES or tensor.layout is not torch.strided:
            raise TypeError(f"{what} can't be saved: {tensor.dtype}, {tensor.layout}")
        if places is not None:
            from ddptrain.rank.checkpoint.shards import own_slice

            if (own := own_slice(what, tensor)) is None:
                return
            tensor, places[name] = own
        copies[name] = self._copy(tensor)

    def complete(self) -> None:
        """Copy the large tensors of the CPU, and wait until the copies from GPUs are complete."""
        if self._to_copy:
            with ThreadPoolExecutor(_COPY_THREADS) as pool:
                list(pool.map(lambda pair: pair[0].copy_(pair[1]), self._to_copy))
            self._to_copy.clear()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def named(self, name: str, value: Any) -> Any:
        """Return what `plain` returns. Raises TypeError, which names the part of the checkpoint."""
        try:
            return self.plain(value)
        except _NotPlain as error:
            raise TypeError(f"{name!r} of the checkpoint {error}") from None

    def plain(self, value: Any) -> Any:
        """Return copies of everything in `value` that may change; `complete` fills large ones. Raises TypeError."""
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
        return _copied_by_torch(value)

    def _copy(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            return source.cpu().clone()
        if (number := self._used) == len(self._buffers):
            self._buffers.append(_host_memory(source))
        self._used += 1
        buffer = self._buffers[number]
        if buffer.shape != source.shape or buffer.dtype != source.dtype or (source.is_cuda and not buffer.is_pinned()):
            buffer = self._buffers[number] = _host_memory(source)
        if (
            source.is_cpu and source.nbytes >= _HUGE_BYTES and torch.get_num_threads() == 1
        ):  # with more threads, torch divides the work itself
            self._to_copy.append((buffer, source))
            return buffer
        buffer.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            self._devices.add(source.device)
        return buffer


def are_finite(weights: Mapping[str, Tensor]) -> bool:
    """Return whether no weight is NaN or infinite. This takes a small part of the time of hashing them."""
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    extremes = (torch.aminmax(each) for each in weights.values() if each.dtype in kinds and each.numel())
    return all(bool(low.isfinite()) and bool(high.isfinite()) for low, high in extremes)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without the DDP wrapper."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether parameters of the model are divided among ranks.

    The parameters alone do not show it: after a forward pass without gradients, FSDP has whole ones until state_dict().
    """
    if "torch.distributed.tensor" not in sys.modules:  # imported by all code that shards a model
        return False
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    by_fsdp = any(isinstance(layer, FSDPModule) for layer in model.modules())
    return by_fsdp or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def plain_bytes(value: Any) -> bytes:
    """Encode a rank's state (plain data, or objects with state_dict()) for `from_bytes`. Raises TypeError."""
    file, buffers = io.BytesIO(), HostBuffers()
    copies = buffers.named("rank_state", value)
    buffers.complete()
    torch.save(copies, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Decode the bytes of `plain_bytes` without executing a pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def memory_of(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors only if they use the same memory; None if this is unknown."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the slice of a DTensor
    if local.layout is not torch.strided or local.numel() == 0 or local.device.type == "meta":
        return None
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype


def _host_memory(like: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor in host memory with the shape and type of `like`.

    Large tensors are in shared memory: after a fork (of data loader workers), the next copy into private memory would
    first copy each page. Huge pages make the first copy faster if the kernel supports them for shared memory.
    """
    size = like.numel() * like.element_size()
    if like.is_cuda or size < _HUGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    memory = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class _NotPlain(TypeError):
    """A part of the state could only be loaded by executing a pickle."""


def _copied_by_torch(value: Any) -> Any:
    """Save and load an object with weights_only; return the copy. Raises _NotPlain now, rather than at the resume."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the object's own code raises
        text = sanitized(str(error))
        unsupported = re.search(r"Unsupported [^\n]+? was not an allowed global", text)
        reason = unsupported[0] if unsupported else one_line(text) or type(error).__name__
        raise _NotPlain(
            "must load without executing a pickle: give numbers, text, lists, dictionaries, tensors, "
            f"or objects with state_dict(), not {type(value).__qualname__} ({reason})"
        ) from None  # torch's own message advises the user to execute the pickle
