"""A rank's slices of a sharded model and its optimizer: which it saves, and which it loads.

A checkpoint of any number of ranks, also of a model that is not sharded, is loaded without loss: each rank reads the
slices that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ddptrain.protocol.tensor_slices import OPTIMIZER, Place, SavedTensor, read_shards, saved_model
from ddptrain.rank.checkpoint.weights import tensor_of

_NAMES = "ddptrain.names"  # key in the optimizer's saved parameter groups: the names of weights, in place of numbers


def own_slice(what: str, tensor: Tensor) -> tuple[Tensor, Place] | None:
    """Return the slice that this rank saves; None if it is empty, or another rank saves the same slice.

    Raises TypeError if the tensor is not divided into slices, for example partial sums.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return (tensor, (shape, (0,) * len(shape))) if torch.distributed.get_rank() == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(
        placement.is_replicate() and position != 0
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    ):
        return None
    size, offset = place_of(tensor)
    local = tensor.to_local()
    if tuple(local.shape) != size or not all(type(each) in (Shard, Replicate) for each in tensor.placements):
        raise TypeError(f"{what} can't be saved: it is placed as {tensor.placements} on {tensor.device_mesh}")
    return (local, (tuple(tensor.shape), offset)) if local.numel() else None


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size and the offset of this rank's slice."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state as <weight>/<name>, and the rest of what state_dict() would return.

    Raises TypeError if the optimizer has a parameter that the model lacks, or a state that cannot be divided.
    """
    tensors: dict[str, Tensor] = {}
    names, loose, groups = _names(model, optimizer), {}, []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [], _NAMES: [names[each] for each in group["params"]]})
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                full = f"{names[parameter]}/{key}"
                if not isinstance(value, Tensor):
                    loose[full] = value
                    continue
                if isinstance(parameter, DTensor) and value.numel() > 1 and value.shape != parameter.shape:
                    raise TypeError(
                        f"the optimizer's {full!r} can't be saved: its shape {list(value.shape)} is not that of the "
                        f"sharded weight, {list(parameter.shape)}; use an optimizer with a state for each value, such "
                        "as Adam or SGD"
                    )
                tensors[full] = value
    return tensors, {"param_groups": groups, "loose": loose}


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names of the model's parameters. Raises TypeError if the optimizer has another one."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in chain(*(group["params"] for group in optimizer.param_groups)):
        if parameter not in names:
            raise TypeError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that the sharded model does not "
                "have: create the optimizer after ctx.prepare"
            )
    return names


def own_weights(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Return the saved weights for `load_state_dict`, divided as those of the model. Raises SlicesError, OSError."""
    saved, tied = saved_model(folder)
    saved |= {name: saved[kept] for name, kept in tied.items()}
    state = model.state_dict()
    return {name: _placed_like(state.get(name), value) for name, value in saved.items()}


def load_optimizer(folder: Path, saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Load the state of an optimizer; model and checkpoint may be sharded or not.

    Raises RuntimeError if its parameters are not those of the checkpoint; SlicesError if files are damaged.
    """
    names = _names(model, optimizer)
    own = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    groups = [dict(group) for group in saved["param_groups"]]
    if _NAMES in groups[0]:
        for group in groups:
            group["params"] = group.pop(_NAMES)
        fits = [group["params"] for group in groups] == own
        state: dict[Any, Any] = defaultdict(dict)
        for full, value in {**read_shards(folder, OPTIMIZER)[0], **saved["loose"]}.items():
            name, _, key = full.rpartition("/")
            state[name][key] = value
    else:  # of a model that is not sharded: parameters are numbered in the order of the groups
        fits = [len(group["params"]) for group in groups] == [len(group) for group in own]
        state = saved["state"]
    if not fits:
        raise RuntimeError(
            f"the optimizer in the checkpoint has other parameters or groups (of {[len(g['params']) for g in groups]} "
            f"parameters) than this one ({[len(group) for group in own]}): give the same groups as before"
        )
    ids = chain(*(group["params"] for group in groups))
    parameters = dict(zip(ids, chain(*(group["params"] for group in optimizer.param_groups)), strict=True))
    placed = {
        each: {key: _placed_like(parameters[each], value) for key, value in values.items()}
        for each, values in state.items()
    }
    optimizer.load_state_dict({"state": placed, "param_groups": groups})


def _placed_like(current: Tensor | None, value: Any) -> Any:
    """Return a saved value as a tensor; one with the shape of `current` is divided as `current` is."""
    if not isinstance(value, SavedTensor | Tensor):
        return value
    if not isinstance(current, DTensor) or tuple(value.shape) != tuple(current.shape):
        return tensor_of(value) if isinstance(value, SavedTensor) else value
    size, offset = place_of(current)
    if isinstance(value, SavedTensor):
        local = tensor_of(value, offset, size)
    else:
        local = value[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))].clone()
    mesh, device = current.device_mesh, current.to_local().device
    # `shape` and `stride` are needed because DTensor would assume that all slices have the same size.
    return DTensor.from_local(
        local.to(device), mesh, current.placements, run_check=False, shape=current.shape, stride=current.stride()
    )
