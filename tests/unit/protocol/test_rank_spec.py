"""Rank specs as JSON: what is decoded, and what is refused with the name of the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import HostSettings, RankSpec, TrackerSpec, TrackingSpec
from tests.unit.specs import make_spec

FULL = make_spec(
    params={"epochs": 3, "layers": [1, 2], "rate": None},
    local_gpus=("0", "GPU-7"),
    every_s=30.5,
    args=("--lr", "1"),
    tracking=TrackingSpec((TrackerSpec("wandb", {"mode": "process"}, 5.0, {"id": "x"}),), "pets", resumed_from=7),
    env={"A": "1"},
    host=HostSettings("0", "/s", 4, {"OMP_NUM_THREADS": {"value": "4", "source": "user"}}),
)


def test_spec_is_the_same_after_its_way_through_json() -> None:
    assert RankSpec.from_json(FULL.to_json()) == FULL
    assert RankSpec.from_json(make_spec().to_json()) == make_spec()


def test_key_names_run_attempt_and_rank() -> None:
    assert make_spec(run_id="r", attempt=2, rank=3).key == "ddptrain/r/2/3"


def test_port_of_the_store_is_the_only_change() -> None:
    changed = FULL.with_port(99)
    assert changed.group.master_port == 99
    assert changed.with_port(FULL.group.master_port) == FULL


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        for name in path[:-1]:
            raw = raw[name]
        raw[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("rank", to="0"), "rank must be an integer, got '0'"),
        (_set("rank", to=True), "rank must be an integer"),
        (_set("rank", to=None), "rank must be an integer"),
        (_set("placement", to=[]), "placement must be a mapping"),
        (_set("placement", "local_gpus", to="01"), "placement.local_gpus must be a list"),
        (_set("placement", "local_gpus", to=["0", 1]), "placement.local_gpus\\[1\\] must be text, got '1'"),
        (_set("placement", "shared", to=1), "placement.shared must be true or false"),
        (_set("group", "timeout_s", to="60"), "group.timeout_s must be a number"),
        (_set("supervision", "grace_s", to=None), "supervision.grace_s must be a number"),
        (_set("checkpointing", "every_epochs", to=0.5), "checkpointing.every_epochs must be an integer"),
        (_set("env", to={"A": 1}), "env.A must be text"),
        (_set("host", "environment", to={"A": {"value": 1}}), "host.environment.A.value must be text"),
        (_set("tracking", "trackers", to=[{"options": {}}]), "tracking.trackers\\[0\\]: .*'name'"),
        (lambda raw: raw.pop("code"), "RankSpec: .*'code'"),
        (lambda raw: raw["group"].pop("backend"), "group: .*'backend'"),
    ],
)
def test_malformed_spec_is_refused_with_the_fields_name(change: Callable[[dict[str, Any]], None], words: str) -> None:
    raw = json.loads(FULL.to_json())
    change(raw)
    with pytest.raises(ClusterError, match=f"malformed RankSpec: {words}"):
        RankSpec.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000])
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="malformed RankSpec"):
        RankSpec.from_json(text)


@pytest.mark.parametrize(("change", "name"), [(_set("new", to=1), "new"), (_set("code", "new", to=1), "code.new")])
def test_field_of_another_version_is_named(change: Callable[[dict[str, Any]], None], name: str) -> None:
    raw = json.loads(FULL.to_json())
    change(raw)
    with pytest.raises(ClusterError, match=f"does not know {name}: driver and workers are of different versions"):
        RankSpec.from_json(json.dumps(raw))
