"""Copies the state of the training into host memory, so that training continues while the copy is written."""

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
from ddptrain.sanitize import sanitized
from ddptrain.workloads.saved_weights import SAFETENSORS_TYPES

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HUGE_BYTES = 4 << 20
_COPY_THREADS = 4  # one thread does not use all of the memory's bandwidth


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights by name, further names of shared weights (name -> name of the weight), and the rest as plain data.

    shards: of a sharded model, this rank's slices of the weights and of the optimizer's state; `weights` is empty then.
    """

    weights: Mapping[str, Tensor]
    tied: Mapping[str, str]
    state: dict[str, Any]
    shards: Shards | None = None


@dataclass(frozen=True, slots=True)
class Shards:
    """A rank's slices of tensors by name, with the place of each: the whole tensor's shape, and the slice's offset.

    tied: as in Snapshot. others: of the model's state, what is no tensor. optimizer_rest: the optimizer's settings, and
    what is no slice of its state; None without an optimizer. An optimizer's tensor is named <weight>/<name>.
    """

    model: Mapping[str, Tensor]
    model_places: Mapping[str, Place]
    optimizer: Mapping[str, Tensor]
    optimizer_places: Mapping[str, Place]
    tied: Mapping[str, str]
    others: Mapping[str, Any]
    optimizer_rest: Mapping[str, Any] | None


class HostBuffers:
    """The memory of one snapshot, reused for the next; memory for tensors of a GPU is pinned."""

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

        Raises TypeError if something would only load by executing a pickle.
        """
        self._used = 0
        self._to_copy.clear()
        shards = None
        if is_sharded(model):
            from ddptrain.rank.checkpoint.shards import own_shards

            shards = own_shards(unwrapped(model), optimizer, self._copy)
        weights, tied, others = self._weights({} if shards else unwrapped(model).state_dict())
        plain = {name: self.named(name, value) for name, value in state.items()}
        others = dict(shards.others) if shards else others
        if others:
            plain["model"] = self.named("model", others)
        rest = shards.optimizer_rest if shards else optimizer
        plain["optimizer"] = self.named("optimizer", rest) if rest is not None else None
        self.complete()
        return Snapshot(weights, shards.tied if shards else tied, plain, shards)

    def complete(self) -> None:
        """Copy the large tensors of the CPU, and wait for the copies from GPUs: then all copies hold their values."""
        if self._to_copy:
            with ThreadPoolExecutor(_COPY_THREADS) as pool:
                list(pool.map(lambda pair: pair[0].copy_(pair[1]), self._to_copy))
            self._to_copy.clear()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _weights(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        """Return each weight once, the names that share one, and what is no tensor (a module's extra state)."""
        weights: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        seen: dict[object, str] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            first = seen.setdefault(memory_of(value) or name, name)
            if first != name:
                tied[name] = first
            else:
                weights[name] = self._copy(value)
                require_savable(f"the weight {name!r}", value)
        return weights, tied, {name: value for name, value in state.items() if not isinstance(value, Tensor)}

    def named(self, name: str, value: Any) -> Any:
        """As `plain`. Raises TypeError, which names the part of the checkpoint."""
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
        return _proven(value)

    def _copy(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            return source.cpu().clone()
        buffer = self._buffer(source)
        if (
            source.is_cpu and source.nbytes >= _HUGE_BYTES and torch.get_num_threads() == 1
        ):  # else torch divides the work
            self._to_copy.append((buffer, source))
            return buffer
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


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether parameters of the model are divided among ranks.

    The parameters alone do not tell: after a forward pass without gradients, FSDP has whole ones until state_dict().
    """
    if "torch.distributed.tensor" not in sys.modules:  # imported by whoever divides a model
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
    """Decode the bytes of `plain_bytes`; nothing is executed."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def require_savable(what: str, tensor: Tensor) -> None:
    """Raise TypeError if a safetensors file cannot hold the tensor."""
    if tensor.dtype not in SAFETENSORS_TYPES or tensor.layout is not torch.strided:
        raise TypeError(f"{what} can't be saved: {tensor.dtype}, {tensor.layout}")


def memory_of(tensor: Tensor) -> object:
    """Return a key that two tensors share only if they are the same memory; None if that is unknown."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _host_memory(like: Tensor) -> Tensor:
    """Return an empty contiguous tensor of that shape and type.

    Large ones are in shared memory: a fork (of a data loader's workers) would make the next copy into private memory
    copy each page once more. Large pages make the first copy faster where the kernel has them for shared memory.
    """
    size = like.numel() * like.element_size()
    if like.is_cuda or size < _HUGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    memory = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class _NotPlain(TypeError):
    """A part of the state would only load by executing a pickle."""


def _proven(value: Any) -> Any:
    """Return a copy of another object if it loads with weights_only. It must fail now rather than at the resume."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the object's own code raises
        raise _NotPlain(
            "must load without executing a pickle: give numbers, text, lists, dictionaries, tensors, "
            f"or objects with state_dict(), not {type(value).__qualname__} ({_reason(error)})"
        ) from None  # torch's message advises to execute the pickle, in colours


def _reason(error: Exception) -> str:
    """The reason in an error of torch.save or torch.load, in one line without escape sequences."""
    text = sanitized(str(error))
    found = re.search(r"Unsupported [^\n]+? was not an allowed global", text)
    return found[0] if found else one_line(text) or type(error).__name__
