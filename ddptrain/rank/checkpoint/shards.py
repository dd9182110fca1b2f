"""Selects and loads a rank's slices of a sharded model and its optimizer.

A checkpoint of any number of ranks, also of a model that is not sharded, is loaded without loss: each rank reads the
slices that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ddptrain.protocol.tensor_slices import OPTIMIZER, Place, SavedTensor, read_shards, saved_model
from ddptrain.rank.checkpoint.snapshot import Shards, memory_of, require_savable, unwrapped
from ddptrain.rank.checkpoint.weights import tensor_of

_NAMES = "ddptrain.names"  # key in the optimizer's saved parameter groups: the names of weights, in place of numbers


def own_shards(model: nn.Module, optimizer: Optimizer | None, copy: Callable[[Tensor], Tensor]) -> Shards:
    """Return copies of the slices that this rank saves. The first rank that has a slice saves it.

    Raises TypeError if a tensor cannot be saved, or the optimizer has a parameter that the model does not.
    """
    weights: dict[str, Tensor] = {}
    places: dict[str, Place] = {}
    tied: dict[str, str] = {}
    others: dict[str, Any] = {}
    names_by_memory: dict[object, str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        first = names_by_memory.setdefault(memory_of(_local(value)) or name, name)
        if first != name:
            tied[name] = first
        elif (own := _own_slice(f"the weight {name!r}", value)) is not None:
            weights[name], places[name] = copy(own[0]), own[1]
    if optimizer is None:
        return Shards(weights, places, {}, {}, tied, others, None)
    state: dict[str, Tensor] = {}
    state_places: dict[str, Place] = {}
    names, loose, groups = _names(model, optimizer), {}, []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [], _NAMES: [names[each] for each in group["params"]]})
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                full = f"{names[parameter]}/{key}"
                if not isinstance(value, Tensor):
                    loose[full] = value
                    continue
                what = f"the optimizer's {key} of {names[parameter]!r}"
                if isinstance(parameter, DTensor) and value.numel() > 1 and value.shape != parameter.shape:
                    raise TypeError(
                        f"{what} can't be saved: its shape {list(value.shape)} is not that of the sharded weight, "
                        f"{list(parameter.shape)}; use an optimizer with a state for each value, such as Adam or SGD"
                    )
                if (own := _own_slice(what, value)) is not None:
                    state[full], state_places[full] = copy(own[0]), own[1]
    return Shards(weights, places, state, state_places, tied, others, {"param_groups": groups, "loose": loose})


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names of the optimizer's parameters. Raises TypeError if the model lacks a parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise TypeError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that the sharded model does not "
                    "have: create the optimizer after ctx.prepare"
                )
    return names


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size and the offset of this rank's slice."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def _own_slice(what: str, tensor: Tensor) -> tuple[Tensor, Place] | None:
    """Return the slice that this rank saves; None if it is empty, or another rank saves the same slice."""
    require_savable(what, tensor)
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


# --- loading ---


def load_weights(folder: Path, model: nn.Module, others: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint into a sharded model, in place; `others` are values that are not tensors.

    Raises RuntimeError, which lists missing and unexpected names and wrong shapes, if they do not fit; SlicesError if
    files are damaged.
    """
    bare = unwrapped(model)
    saved, tied = saved_model(folder)
    saved |= {name: saved[kept] for name, kept in tied.items()}
    state = {name: value for name, value in bare.state_dict().items() if isinstance(value, Tensor)}
    problems = [
        *(f"missing: {name}" for name in state if name not in saved),
        *(f"unexpected: {name}" for name in saved if name not in state),
        *(
            f"{name} has the shape {list(saved[name].shape)} in the checkpoint, {list(value.shape)} in the model"
            for name, value in state.items()
            if name in saved and saved[name].shape != tuple(value.shape)
        ),
    ]
    if problems:
        raise RuntimeError(f"the checkpoint {folder.name} does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, value in state.items():
            where = place_of(value) if isinstance(value, DTensor) else (None, None)
            _local(value).copy_(tensor_of(saved[name], where[1], where[0]))
    if others:
        bare.load_state_dict(dict(others), strict=False)


_SavedOptimizer = tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]  # groups, and state by the weights' names


def load_optimizer(folder: Path, saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Load the state of an optimizer; model and checkpoint may be sharded or not.

    Raises RuntimeError if its parameters are not those of the checkpoint; SlicesError if files are damaged.
    """
    names = _names(unwrapped(model), optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
    saved_groups, saved_state = _by_names(folder, saved, list(numbers))
    if len(saved_groups) != len(optimizer.param_groups):
        raise RuntimeError(
            f"the optimizer in the checkpoint has {len(saved_groups)} parameter groups, this one "
            f"{len(optimizer.param_groups)}: give the same groups as before"
        )
    groups = []
    for group, now in zip(saved_groups, optimizer.param_groups, strict=True):
        own = [names[parameter] for parameter in now["params"]]
        if set(group.pop(_NAMES)) != set(own):
            raise RuntimeError("the optimizer in the checkpoint has other parameters: give the same groups as before")
        groups.append({**group, "params": [numbers[name] for name in own]})
    state = {
        numbers[name]: {key: _placed_like(parameters[numbers[name]], value) for key, value in values.items()}
        for name, values in saved_state.items()
        if name in numbers
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _by_names(
    folder: Path, saved: Mapping[str, Any], order: list[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return an optimizer's groups and state by the names of the weights; `order`: those of the model, for numbers."""
    groups = saved["param_groups"]
    if _NAMES not in groups[0]:  # of a model that is not sharded: parameters are numbered in the order of the groups
        count = sum(len(group["params"]) for group in groups)
        if count != len(order):
            raise RuntimeError(f"the optimizer in the checkpoint has {count} parameters, this one {len(order)}")
        named = [{**group, _NAMES: [order[number] for number in group["params"]]} for group in groups]
        return named, {order[number]: dict(values) for number, values in saved["state"].items()}
    state: dict[str, dict[str, Any]] = {}
    for full, value in {**read_shards(folder, OPTIMIZER)[0], **saved["loose"]}.items():
        name, _, key = full.rpartition("/")
        state.setdefault(name, {})[key] = value
    return [dict(group) for group in groups], state


def _placed_like(parameter: Tensor, value: Any) -> Any:
    """Return a value of the optimizer's state, divided like its parameter if it has the parameter's shape."""
    if not isinstance(value, SavedTensor | Tensor):
        return value
    if not isinstance(parameter, DTensor) or tuple(value.shape) != tuple(parameter.shape):
        return tensor_of(value) if isinstance(value, SavedTensor) else value
    size, offset = place_of(parameter)
    if isinstance(value, SavedTensor):
        local = tensor_of(value, offset, size)
    else:
        local = value[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))].clone()
    mesh, device = parameter.device_mesh, parameter.to_local().device
    # `shape` and `stride` are needed because DTensor would assume that all slices have the same size.
    return DTensor.from_local(
        local.to(device), mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
