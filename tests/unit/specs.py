"""A RankSpec for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddptrain.config.rank_settings import StepProfile
from ddptrain.config.run_config import CheckpointConfig, FailureConfig, PrepareConfig, RunConfig
from ddptrain.driver.rank_specs import rank_sections
from ddptrain.protocol.rank_spec import Code, HostSettings, Placement, ProcessGroup, RankSpec, sections

_SPEC = RankSpec(
    run_id="r-1",
    attempt=1,
    rank=0,
    config=rank_sections(RunConfig(workload="m:f", failure=FailureConfig(grace_s=1.0))),
    placement=Placement(world_size=4, local_rank=0, local_world_size=2, node_rank=0, slot=0),
    group=ProcessGroup("gloo", 60.0, "10.0.0.1", 1234),
    code=Code("m:f", "/"),
)
_GROUP_OF = {
    field.name: group
    for group, kind in (
        ("placement", Placement),
        ("code", Code),
        ("group", ProcessGroup),
        ("host", HostSettings),
    )
    for field in dataclasses.fields(kind)
}


_SECTION_OF = {
    name: section
    for section, kind in (("checkpoint", CheckpointConfig), ("failure", FailureConfig), ("prepare", PrepareConfig))
    for name in kind.model_fields
}


def _with_sections(spec: RankSpec, changes: dict[str, Any]) -> RankSpec:
    raw = {name: vars(each) if hasattr(each, "__dict__") else each for name, each in vars(spec.config).items()}
    for name in changes.keys() & _SECTION_OF.keys():
        raw[_SECTION_OF[name]] = {**raw[_SECTION_OF[name]], name: changes.pop(name)}
    if isinstance(prepare := changes.pop("prepare", None), dict):
        raw["prepare"] = {**raw["prepare"], **prepare}
    if isinstance(profile := changes.pop("profile", None), StepProfile):
        raw["profile"] = {"steps": [profile.first, profile.last], "ranks": list(profile.ranks) or None}
    return dataclasses.replace(spec, config=sections(raw))


def change_spec(spec: RankSpec, **changes: Any) -> RankSpec:
    """Return the spec with changed fields; a field of a group or section is named without it. A group replaces it."""
    spec = _with_sections(spec, changes)
    groups: dict[str, dict[str, Any]] = {}
    for name in changes.keys() & _GROUP_OF.keys():
        groups.setdefault(_GROUP_OF[name], {})[name] = changes.pop(name)
    changed = {group: dataclasses.replace(getattr(spec, group), **fields) for group, fields in groups.items()}
    return dataclasses.replace(spec, **{**changed, **changes})


def make_spec(**changes: Any) -> RankSpec:
    """Return the spec of rank 0 of 4, two ranks on each host, with changes."""
    return change_spec(_SPEC, **changes)
