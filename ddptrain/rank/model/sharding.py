"""Shards a model over ranks (FSDP2), and recomputes chosen layers in the backward pass to save memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DDP = "ddp"
STRATEGIES = (DDP, "fsdp", "hybrid")


def checked_strategy(settings: Mapping[str, Any], ddp: Mapping[str, Any]) -> str:
    """Return the strategy of `settings`. `ddp` are arguments of DDP, which the other strategies do not use.

    Raises ValueError for an unknown strategy, TypeError for an argument that DDP does not have.
    """
    strategy: str = settings.get("strategy", DDP)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    known = signature(nn.parallel.DistributedDataParallel).parameters
    if unknown := [name for name in ddp if name not in known]:
        raise TypeError(f"{unknown[0]!r} is an argument neither of ctx.prepare nor of DistributedDataParallel")
    return strategy


def checkpoint_activations(model: nn.Module, classes: Sequence[str]) -> None:
    """Recompute the layers of these classes in the backward pass. Raises ValueError for an unknown class."""
    for layer in layers_of(model, classes, "activation_checkpointing"):
        wrap_forward(layer, _recomputing)


def wrap_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's forward by wrap(forward), in place, so that the weights keep their names.

    It is bound as a method, which copy.deepcopy binds to the copy: a copy, as of an average of the weights, computes
    with its own weights.
    """
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        module.forward = MethodType(wrap(forward.__func__), module)
    else:  # the user has replaced it by a function
        module.forward = wrap(forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recompute(*args: Any, **more: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **more)

    return recompute


def layers_of(model: nn.Module, classes: Sequence[str], setting: str) -> list[nn.Module]:
    """Return the layers of these classes. Raises ValueError, which lists the existing classes, for an unknown class."""
    class_names = {type(layer).__name__ for layer in model.modules()}
    if missing := [name for name in classes if name not in class_names]:
        names = ", ".join(sorted(class_names))
        raise ValueError(f"prepare.{setting}: the model has no layer of class {missing[0]!r}; it has {names}")
    return [layer for layer in model.modules() if type(layer).__name__ in classes]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the outermost ModuleLists with two or more entries: most large models repeat one block."""
    if isinstance(model, nn.ModuleList) and len(model) > 1:
        return [block for block in model if next(block.parameters(), None) is not None]
    return [block for child in model.children() for block in repeated_blocks(child)]


def shard_model(
    model: nn.Module, device: torch.device, settings: Mapping[str, Any], dtype: torch.dtype | None
) -> nn.Module:
    """Shard the parameters over the ranks, in place; all ranks must call it. All ranks start with rank 0's weights.

    dtype: the type in the forward and backward pass; gradients are summed in float32. A model on the meta device is
    initialized after it was sharded, by the `reset_parameters` of its layers.

    Raises ValueError if hosts have different numbers of ranks, or a layer on the meta device cannot initialize itself.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _mesh(device, settings)
    classes = settings.get("shard") or ()
    blocks = layers_of(model, classes, "shard") if classes else repeated_blocks(model)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty:
        _check_initializers(model)
    else:
        _copy_from_rank_zero(model, device)
    reduced = torch.float32 if dtype is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    for block in reversed(blocks):  # inner layers come before those that contain them
        if block is not model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=reduced)
    )
    if is_empty:
        _initialize(model, device, mesh)
    return model.to(device)  # buffers


def _mesh(device: torch.device, settings: Mapping[str, Any]) -> DeviceMesh:
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    ranks = get_world_size()
    if settings.get("strategy") != "hybrid":
        return init_device_mesh(device.type, (ranks,))
    hosts, on_host = int(settings.get("hosts", 1)), int(settings.get("ranks_on_host", ranks))
    if hosts * on_host != ranks:
        raise ValueError(
            f"strategy hybrid needs the same number of ranks on each host, but of {ranks} ranks on {hosts} hosts "
            f"{on_host} are on this host: choose another number of ranks, or strategy fsdp"
        )
    return init_device_mesh(device.type, (hosts, on_host), mesh_dim_names=("replicate", "shard"))


def _copy_from_rank_zero(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0, as DDP does; on `device`, one tensor at a time."""
    from torch.distributed import broadcast

    for tensor in (*model.parameters(), *model.buffers()):
        on_device = tensor.detach().to(device).contiguous()
        broadcast(on_device, 0)
        tensor.detach().copy_(on_device)


def _check_initializers(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors) and not hasattr(layer, "reset_parameters"):
            raise ValueError(
                f"layer {name or type(layer).__name__!r} is on the meta device, and {type(layer).__name__} has no "
                "method reset_parameters() that initializes it: add one, or create the model on the CPU"
            )


def _initialize(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    from torch.distributed import broadcast

    model.to_empty(device=device)
    seed = torch.tensor(torch.initial_seed() % (1 << 62), device=device)
    broadcast(seed, 0)  # the same slice on two hosts must begin equal, and users seed ranks differently
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), warnings.catch_warnings():
        # On the CPU, torch draws each rank's slices from its own generator: equal seeds would give equal slices.
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        torch.manual_seed(int(seed) + mesh.get_local_rank(mesh.ndim - 1))
        for layer in model.modules():
            reset: Callable[[], None] | None = getattr(layer, "reset_parameters", None)
            if reset is not None:
                reset()
    for buffer in model.buffers():
        broadcast(buffer, 0)
