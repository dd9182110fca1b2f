"""ctx.prepare: device, precision, DDP or FSDP, torch.compile and its cache."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import platformdirs
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddptrain.protocol.rank_spec import RankSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models that were given, and those that were returned
STRATEGIES = ("ddp", "fsdp", "hybrid")
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_model(model: nn.Module, device: torch.device, settings: Mapping[str, Any], **ddp: Any) -> nn.Module:
    """Move the model to the device, apply `settings` (see config), and wrap it in DDP or shard it.

    `ddp` are arguments of DistributedDataParallel, which does not accept a model without trainable parameters: such a
    model is returned without DDP. The other strategies ignore them.

    Raises ValueError for an unknown precision or strategy, and for a model that is in DDP or has been prepared before;
    TypeError for an argument that DDP does not have.
    """
    if model in _prepared:
        raise ValueError("ctx.prepare was called with this model before: call it once, and use the model it returned")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("ctx.prepare was given a model in DistributedDataParallel: give it the model inside (.module)")
    precision, strategy = settings.get("precision", "fp32"), settings.get("strategy", STRATEGIES[0])
    for name, value, known in (("precision", precision, _PRECISIONS), ("strategy", strategy, STRATEGIES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(known)}")
    if unknown := [name for name in ddp if name not in signature(DistributedDataParallel).parameters]:
        raise TypeError(f"{unknown[0]!r} is an argument neither of ctx.prepare nor of DistributedDataParallel")
    sharded = strategy != STRATEGIES[0]
    if sharded and precision == "fp16":
        raise ValueError("precision fp16 needs strategy ddp: choose bf16 or fp32 for a model that ranks share")
    if not sharded:  # a sharded model is moved layer by layer, because it may be too large for the device
        model = model.to(device)
    checkpoint_activations(model, settings.get("activation_checkpointing") or ())
    if settings.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    dtype = _PRECISIONS[precision]
    if sharded:
        model = shard_model(model, device, settings, dtype)
    elif dtype is not None:
        wrap_forward(model, torch.autocast(device.type, dtype=dtype))
    if settings.get("compile"):
        model.compile()
    _prepared.add(model)
    if sharded or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **ddp)
    _prepared.add(wrapped)
    return wrapped


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

    dtype: the type in the forward and backward pass; gradients are summed in float32.

    Raises ValueError if hosts have different numbers of ranks, or the model is on the meta device.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _mesh(device, settings)
    classes = settings.get("shard") or ()
    blocks = layers_of(model, classes, "shard") if classes else repeated_blocks(model)
    _copy_from_rank_zero(model, device)
    reduced = torch.float32 if dtype is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    for block in reversed(blocks):  # inner layers come before those that contain them
        if block is not model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=reduced)
    )
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
        if tensor.is_meta:
            raise ValueError("the model is on the meta device, without weights: create it on the CPU")
        on_device = tensor.detach().to(device).contiguous()
        broadcast(on_device, 0)
        tensor.detach().copy_(on_device)


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TORCHS_OWN = "torchinductor_"  # torch sets the variable to its default, <tmp>/torchinductor_<user>, when imported


def use_compile_cache(spec: RankSpec) -> None:
    """Have inductor keep generated code below the user's cache folder, unless the user has named a folder.

    The code is executed, so the staging folder of the rank is used if the cache folder is not this user's.
    """
    chosen = spec.env.get(_VARIABLE, "")
    if chosen and not Path(chosen).name.startswith(_TORCHS_OWN):
        return
    root = platformdirs.user_cache_path("ddptrain") / "compile"
    with suppress(OSError):
        root.mkdir(0o700, parents=True, exist_ok=True)
    is_own = root.is_dir() and os.access(root, os.W_OK) and root.stat().st_uid == os.getuid()
    os.environ[_VARIABLE] = str(root if is_own else Path(spec.host.staging) / "compile")
