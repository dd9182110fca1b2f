"""A RankSpec for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddptrain.protocol.rank_spec import (
    Checkpointing,
    Code,
    HostSettings,
    Placement,
    ProcessGroup,
    RankSpec,
    Supervision,
)

_SPEC = RankSpec(
    run_id="r-1",
    attempt=1,
    rank=0,
    placement=Placement(world_size=4, local_rank=0, local_world_size=2, node_rank=0, slot=0),
    group=ProcessGroup("gloo", 60.0, "10.0.0.1", 1234),
    checkpointing=Checkpointing(every_epochs=1),
    code=Code("m:f", "/"),
    supervision=Supervision(grace_s=1.0),
)
_GROUP_OF = {
    field.name: group
    for group, kind in (
        ("placement", Placement),
        ("checkpointing", Checkpointing),
        ("code", Code),
        ("supervision", Supervision),
        ("group", ProcessGroup),
        ("host", HostSettings),
    )
    for field in dataclasses.fields(kind)
}


def change_spec(spec: RankSpec, **changes: Any) -> RankSpec:
    """Return the spec with changed fields; a field of a group is named without its group. A whole group replaces it."""
    groups: dict[str, dict[str, Any]] = {}
    for name in changes.keys() & _GROUP_OF.keys():
        groups.setdefault(_GROUP_OF[name], {})[name] = changes.pop(name)
    changed = {group: dataclasses.replace(getattr(spec, group), **fields) for group, fields in groups.items()}
    return dataclasses.replace(spec, **{**changed, **changes})


def make_spec(**changes: Any) -> RankSpec:
    """Return the spec of rank 0 of 4, two ranks on each host, with changes."""
    return change_spec(_SPEC, **changes)
