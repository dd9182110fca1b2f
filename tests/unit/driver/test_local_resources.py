"""How many ranks a machine gets, and on which GPUs."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import pytest

from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.driver import cluster_session as local_resources
from ddptrain.driver.cluster_session import LocalResources
from ddptrain.errors import ClusterError


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(environ: Mapping[str, str]) -> tuple[str, ...]:
        return ("0", "1", "2", "3")

    monkeypatch.setattr(local_resources, "visible_gpus", visible)


@pytest.mark.usefixtures("four_gpus")
def test_more_ranks_than_gpus_are_refused_with_the_way_out() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.ranks is 5, but there are 4 GPUs.*cluster\.gpus to 0"):
        local_resources.local_resources(ClusterConfig(ranks=5), {})


@pytest.mark.usefixtures("four_gpus")
def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.gpus is 5, but this machine has 4"):
        local_resources.local_resources(ClusterConfig(gpus=5), {})


def test_machine_without_gpus_gets_at_least_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.gpus.usable_cores", lambda: 2)
    assert local_resources.local_resources(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": ""}) == LocalResources(2, ())
    monkeypatch.setattr("ddptrain.gpus.usable_cores", lambda: 16)
    assert local_resources.local_resources(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": ""}) == LocalResources(8, ())


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (2, 2), (8, 8)])
def test_no_warning_about_as_many_ranks_as_cores(ranks: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_resources, "default_slots", lambda _: 2)
    assert local_resources.crowding(LocalResources(ranks, ()), cores) == ""


def test_more_ranks_than_cores_are_warned_of_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_resources, "default_slots", lambda _: 2)
    expected = "40 ranks share 2 cores: their start and each step take longer; --ranks 2 may be faster"
    assert local_resources.crowding(LocalResources(40, ()), 2) == expected
    assert local_resources.crowding(LocalResources(40, tuple("0123")), 2) == ""


def test_limit_on_the_size_of_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": resource.RLIM_INFINITY}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits["now"], -1) if kind == resource.RLIMIT_FSIZE else ()
    )
    assert local_resources.resource_warnings(LocalResources(1, ()), 8) == []
    limits["now"] = 102_400
    assert local_resources.resource_warnings(LocalResources(1, ()), 8) == [
        "files may have at most 102,400 bytes (ulimit -f): larger logs and checkpoints fail; raise the limit"
    ]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": 2}, LocalResources(2, ("0", "1"))),
        ({"gpus": 0, "ranks": 6}, LocalResources(6, ())),
        ({"gpus": 3}, LocalResources(3, ("0", "1", "2"))),
        ({"ranks": 4}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": {"min": 1, "max": 3}}, LocalResources(3, ("0", "1", "2"))),
        ({"ranks": {"min": 1, "max": 9}}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": {"min": 1, "max": 9}, "gpus": 0}, LocalResources(9, ())),
    ],
)
def test_ranks_and_gpus_of_a_setting(settings: dict[str, Any], expected: LocalResources) -> None:
    assert local_resources.local_resources(ClusterConfig.model_validate(settings), {}) == expected
