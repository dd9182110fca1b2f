"""Where ranks are, and what each of them is given."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver import rank_specs
from ddptrain.driver import ranks as rank_place
from ddptrain.driver.ranks import RankPlace, rank_places
from ddptrain.driver.transfer.code_package import move_code
from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import Code, Placement, ProcessGroup

# --- The rank specs that a configuration and its places lead to, with known values ---


def load(folder: Path = Path("/project"), **config: Any) -> ResolvedConfig:
    return load_mapping({"workload": "petnames", **config}, folder)


def places(*hosts: str, gpus: bool = True) -> list[RankPlace]:
    """Ranks 0, 1, ... on these hosts."""
    slots = [Slot(f"tcp://{host}", host, hosts[:rank].count(host), gpus, True) for rank, host in enumerate(hosts)]
    devices = {f"tcp://{host}": ",".join(f"GPU-{host}-{number}" for number in range(9)) for host in hosts}
    about = {
        worker: {"gpus": of_host if gpus else "", "hostname": worker[6:], "scratch": "/scratch"}
        for worker, of_host in devices.items()
    }
    return rank_places(slots, about, dict.fromkeys(about, False))


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, True, ProcessGroup("nccl", 600.0, "a")),
        ({}, False, ProcessGroup("gloo", 1800.0, "a")),
        ({"cluster": {"gpus": 0}}, True, ProcessGroup("gloo", 1800.0, "a")),
        ({"dist": {"backend": "gloo", "timeout_s": 9}}, True, ProcessGroup("gloo", 9.0, "a")),
        ({"dist": {"backend": "nccl"}}, False, ProcessGroup("nccl", 600.0, "a")),
    ],
)
def test_backend_follows_the_gpus_and_its_time_limit_the_backend(
    settings: dict[str, Any], gpus: bool, expected: ProcessGroup
) -> None:
    assert rank_specs.process_group(load(**settings).config, places("a", "b", gpus=gpus)) == expected


def test_ranks_with_and_without_gpu_need_a_named_backend() -> None:
    mixed = [*places("a"), *places("b", gpus=False)]
    with pytest.raises(ClusterError, match="only 1 of 2 ranks would have a GPU"):
        rank_specs.process_group(load().config, mixed)
    assert rank_specs.process_group(load(dist={"backend": "gloo"}).config, mixed).backend == "gloo"
    assert rank_specs.process_group(load(cluster={"gpus": 0}).config, mixed).backend == "gloo"


def test_instances_of_one_gpu_use_gloo() -> None:
    slices = [dataclasses.replace(place, gpu=f"MIG-{place.rank}") for place in places("a", "a")]
    assert rank_specs.process_group(load().config, slices).backend == "gloo"


def test_sections_of_the_configuration_reach_the_rank_unchanged_without_secrets() -> None:
    config = load(params={"epochs": 2}, env={"TOKEN": "x"}, failure={"nan": "stop", "hang_timeout_s": 8}).config
    found = rank_specs.rank_sections(config)
    assert found.failure.nan == "stop" and found.failure.hang_timeout_s == 8.0
    assert vars(found.checkpoint) == config.checkpoint.model_dump()
    assert not hasattr(found, "params") and not hasattr(found, "env")
    scored = load(profile={"steps": [1, 2]}, stop_early={"patience": 3}).config
    scoring = rank_specs.rank_sections(scored, is_training=False)
    assert (scoring.profile, scoring.stop_early) == (None, None)


def test_built_in_workload_searches_no_folder_of_the_users(tmp_path: Path) -> None:
    code = rank_specs.code(load(tmp_path, params={"epochs": 2}))
    assert code == Code("ddptrain.workloads.petnames.train:train", os.getcwd(), {"epochs": 2}, built_in=True)


def test_built_in_workload_with_a_tracker_of_the_user_searches_their_folders(tmp_path: Path) -> None:
    code = rank_specs.code(load(tmp_path, tracking={"other": [{"name": "mine:Tracker"}]}))
    assert code.built_in and code.sys_path == (str(tmp_path), os.getcwd())


def test_copied_code_has_the_paths_of_the_copy_and_leaves_other_paths_alone() -> None:
    code = Code("m:f", "/home/p/sub", script="/home/p/t.py", sys_path=("/home/p", "/opt/lib"))
    moved = move_code(code, Path("/home/p"), "/cache/1", "1")
    assert moved == Code(
        "m:f", "/cache/1/sub", script="/cache/1/t.py", sys_path=("/cache/1", "/opt/lib"), content_hash="1"
    )
    relative = move_code(Code("m:f", "/home/p", script="t.py"), Path("/home/p"), "/cache/1", "1")
    assert relative.script == "t.py"


# --- Where ranks run, and what their workers see ---


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [("boot1 mnt:[1]", "boot1 mnt:[1]", True), ("boot1 mnt:[1]", "boot1 mnt:[2]", False), ("", "", False)],
)
def test_worker_with_the_drivers_view_sees_the_same_files(
    mine: str, theirs: str, *, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_place, "file_view", lambda: mine)
    about = {"w": {"gpus": "", "hostname": "h", "scratch": "/s", "files": theirs}}
    (place,) = rank_places([Slot("w", "h", 0, False, True)], about, {"w": True})
    assert place.same_files is same


def test_worker_that_does_not_say_what_it_sees_gets_copies() -> None:
    about = {"w": {"gpus": "", "hostname": "h", "scratch": "/s"}}
    (place,) = rank_places([Slot("w", "h", 0, False, True)], about, {"w": True})
    assert not place.same_files


def test_ranks_are_numbered_by_slot_and_hosts_by_their_first_rank() -> None:
    gpus = {"w": "GPU-a,GPU-b", "v": ""}
    about = {worker: {"gpus": gpus[worker], "hostname": f"host-{worker}", "scratch": f"/{worker}"} for worker in "wv"}
    slots = [Slot("w", "10.0.0.1", 1, True, True), Slot("v", "127.0.0.1", 0, False, True)]
    slots.append(Slot("w", "10.0.0.1", 2, True, True))
    first, second, third = rank_places(slots, about, {"w": False, "v": True})
    assert first.placement == Placement(3, 0, 2, 0, 1, hosts=2, shared=False)
    assert second.placement == Placement(3, 0, 1, 1, 0, hosts=2, shared=True)
    assert third.placement == Placement(3, 1, 2, 0, 2, hosts=2, shared=False)
    assert [place.gpu for place in (first, second, third)] == ["GPU-b", "", ""]
    assert [place.host for place in (first, second)] == ["host-w (10.0.0.1)", "host-v"]
    assert places("a", "a", "b")[1].placement.local_gpus == ("GPU-a-0", "GPU-a-1")
