"""Looking at clusters that do not answer."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ddptrain.clusters import cluster_records, status
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.render import sections
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.status import State
from ddptrain.host_identity import HostId, this_host


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Somebody listens there who never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def dead_address() -> Iterator[str]:
    """Nobody listens there, nor can while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def entry(name: str, address: str = "") -> Deployment:
    return cluster_records.create(ClusterRecord(name, "local", "2026-01-01T00:00:00+00:00", address=address))


def test_address_where_nobody_listens_is_gone_for_certain(dead_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOOK_TIMEOUT_S", 60.0)
    view = status.at(entry("dev", dead_address))
    assert (view.state, view.certain) == (State.ENDED, True)
    assert view.reason == f"no scheduler listens at {dead_address} any more"


def test_refusal_is_certain_also_where_dask_has_given_up_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def given_up(deployment: Deployment, timeout_s: float) -> dict[str, object]:
        raise OSError("timed out")

    async def refused(address: str) -> None:
        pass

    monkeypatch.setattr(status, "_ask", given_up)
    monkeypatch.setattr(status, "_is_refused", refused)
    view = status.at(entry("dev", "tcp://127.0.0.1:1"))
    assert (view.certain, view.reason) == (True, "no scheduler listens at tcp://127.0.0.1:1 any more")


def test_scheduler_that_is_silent_may_just_be_slow(silent_address: str) -> None:
    view = status.at(entry("dev", silent_address))
    assert (view.state, view.certain) == (State.ENDED, False)
    assert view.reason == f"{silent_address} does not answer within 2 s"


def test_many_silent_schedulers_take_no_longer_than_one(silent_address: str) -> None:
    for number in range(40):
        entry(f"dev-{number}", silent_address)
    began = time.monotonic()
    views = status.every()
    assert time.monotonic() - began < 20 * status.LOOK_TIMEOUT_S  # one after the other they take 40 times as long
    assert len(views) == 40 and {view.state for view in views} == {State.ENDED}


@pytest.mark.parametrize(
    ("host", "state_", "certain", "reason"),
    [
        (HostId("login2", "m2", "b2", "p"), State.ELSEWHERE, False, "it runs on the host login2, and this is "),
        (dataclasses.replace(this_host(), boot="b0"), State.ENDED, True, "was restarted after the cluster was started"),
    ],
)
def test_cluster_of_another_host_or_boot_is_not_connected_to(
    host: HostId, state_: State, certain: bool, reason: str
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        deployment = entry("dev", f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        deployment.update(host=host)
        view = status.at(deployment)
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert (view.state, view.certain) == (state_, certain) and reason in view.reason
    assert view.as_dict()["host"] == host.name


def test_cluster_that_ended_by_itself_says_when_and_why(dead_address: str) -> None:
    deployment = entry("dev", dead_address)
    (deployment.folder / "ended.json").write_text(json.dumps({"reason": "idle for 60 s", "at": "2026-01-02T03:04:05"}))
    view = status.at(deployment)
    assert view.state == State.ENDED
    assert view.reason == "it ended by itself at 2026-01-02T03:04:05: idle for 60 s"


def test_cluster_without_a_scheduler_is_starting_while_a_command_holds_it() -> None:
    deployment = entry("dev")
    with cluster_records.locked("dev"):
        assert status.at(deployment).state == State.STARTING
    view = status.at(deployment)
    assert (view.state, view.reason) == (State.ENDED, "its start was interrupted")


def test_look_at_a_cluster_does_not_keep_a_command_from_starting_it() -> None:
    entry("dev")
    with cluster_records.locked("dev"):
        assert cluster_records.is_locked("dev")
    assert not cluster_records.is_locked("dev")
    with cluster_records.locked("dev"):
        pass


def test_run_that_waits_is_told_with_what_it_waits_for_and_how_long() -> None:
    waiting = [{"run_id": "b-1", "asked": 2, "waited_s": 9.6}, {"run_id": "c-1", "asked": None, "waited_s": 1.0}]
    told: dict[str, list[Any]] = {"workers": [], "runs": [], "waiting": waiting}
    shown = dict(sections(status.seen(entry("dev", "tls://10.0.0.1:2"), told)))
    assert shown["waiting"] == [("1. b-1", "for 2 slots, for 10 s"), ("2. c-1", "for all slots, for 1 s")]


def test_look_as_data_holds_what_programs_need() -> None:
    told = {
        "workers": [
            {
                "address": "tcp://10.0.0.1:1",
                "name": "vm",
                "host": "10.0.0.1",
                "slots": 4,
                "gpus": 2,
                "held": 3,
                "last_seen_s": 0.1,
                "warm": True,
            }
        ],
        "runs": [{"run_id": "a-1", "slots": 3, "hosts": ["10.0.0.1"]}],
        "waiting": [{"run_id": "b-1", "asked": 2, "waited_s": 1.5}],
    }
    data = status.seen(entry("dev", "tls://10.0.0.1:2"), told).as_dict()
    assert (data["state"], data["tls"], data["slots"], data["free"], data["gpus"]) == ("up", True, 4, 1, 2)
    assert data["workers"][0]["free"] == 1 and data["hosts"] == ["10.0.0.1"]
    assert data["waiting"] == [{"run_id": "b-1", "place": 1, "asked": 2, "waited_s": 1.5}]
    assert json.loads(json.dumps(data)) == data


def test_client_of_a_cluster_does_not_count_as_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "of_deployment", lambda deployment: Target("tls://s", "security"))  # type: ignore[arg-type]
    monkeypatch.setattr("distributed.Client", lambda address, **options: (address, options))
    expected = {"security": "security", "timeout": 10, "name": "ddptrain-look", "set_as_default": False}
    assert cast(Any, status.client_of(cast(Any, None))) == ("tls://s", expected)
    asynchronous = cast(Any, status.client_of(cast(Any, None), 2.0, asynchronous=True))
    assert asynchronous == ("tls://s", expected | {"timeout": 2.0, "asynchronous": True})
