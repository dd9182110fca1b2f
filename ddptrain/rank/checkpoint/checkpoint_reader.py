"""Loads a checkpoint for ctx.resume: into the user's objects, and into the random number generators of the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint import file_format, random_state

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that a run continues from: its `step`, its `epoch`, and in `data` the extra state.

    world_size: the number of ranks that saved it. rank_state: that of this rank; None if the number of ranks differs.
    """

    step: int
    epoch: float | None
    data: Mapping[str, Any]
    rank_state: Any = None
    world_size: int = 0


def load_checkpoint(
    spec: RankSpec,
    device: torch.device,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    more: Mapping[str, Any],
    note: Callable[[str], None],
) -> tuple[Resumed, dict[str, Any]]:
    """Load the checkpoint of `spec` into the given objects; return the result for the user, and all of its state."""
    state = file_format.read(Path(spec.checkpointing.resume_from), model, optimizer, device)
    extra: dict[str, Any] = state["extra"]
    for name, value in more.items():
        if name in extra:
            value.load_state_dict(extra[name])
        else:
            note(f"the checkpoint of step {state['step']} contains no {name!r}: it starts from the beginning")
    ranks = state.get("ranks") or []
    rank_data = ranks[spec.rank] if len(ranks) == spec.placement.world_size else None
    data = {name: _moved(device, value) for name, value in extra.items() if name not in more}
    _restore_random(spec, device, ranks, rank_data, note)
    rank_state = rank_data["rank_state"] if rank_data else None
    resumed = Resumed(state["step"], state["epoch"], data, rank_state, len(ranks) or spec.placement.world_size)
    return resumed, state


def _restore_random(
    spec: RankSpec, device: torch.device, ranks: list[Any], rank_data: Any, note: Callable[[str], None]
) -> None:
    if rank_data:
        random_state.restore(rank_data["random"], device)
    elif ranks:
        world_size = spec.placement.world_size
        note(
            f"the checkpoint is of {len(ranks)} ranks, this run has {world_size}: it continues where they were, "
            "with new random states"
            if len(ranks) != world_size
            else "the checkpoint lacks the random states of some ranks: those are new"
        )
        random_state.reseed(ranks[0]["random"], spec.rank)


def _moved(device: torch.device, value: Any) -> Any:
    """Return plain data with all tensors moved to the device."""
    if type(value) in (list, tuple, set):
        return type(value)(_moved(device, item) for item in value)
    if isinstance(value, dict):
        return {key: _moved(device, item) for key, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value
