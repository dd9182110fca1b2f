"""The rank specs that a configuration and its places lead to, with known values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver import rank_specs
from ddptrain.driver.evaluation_plan import RANK_FUNCTION, EvaluationPlan
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import Checkpointing, Code, Placement, ProcessGroup, Supervision
from ddptrain.results.layout import MANIFEST
from ddptrain.results.run_record import CodeRecord
from tests.unit.notes import Notes


def load(folder: Path = Path("/project"), **config: Any) -> ResolvedConfig:
    return load_mapping({"workload": "petnames", **config}, folder)


def places(*hosts: str, gpus: bool = True) -> list[RankPlace]:
    """Ranks 0, 1, ... on these hosts; each host's ranks are numbered from 0, and use its GPUs in reverse order."""
    found = []
    for rank, host in enumerate(hosts):
        local, size = hosts[:rank].count(host), hosts.count(host)
        slot = Slot(f"tcp://{host}", host, local, gpus, True)
        node = list(dict.fromkeys(hosts)).index(host)
        gpu = f"GPU-{host}-{size - 1 - local}" if gpus else ""
        found.append(RankPlace(rank, local, size, node, slot, host, Path("/scratch"), False, gpu))
    return found


def test_placement_counts_ranks_and_hosts_and_lists_the_gpus_of_its_host() -> None:
    three = places("a", "a", "b")
    assert rank_specs.all_placements(three, use_gpu=True)[1] == Placement(
        3, 1, 2, 0, 1, hosts=2, local_gpus=("GPU-a-1", "GPU-a-0"), use_gpu=True, shared=False
    )
    assert rank_specs.all_placements(three, use_gpu=True)[2].local_gpus == ("GPU-b-0",)
    assert rank_specs.all_placements(three, use_gpu=False)[1].local_gpus == ()


def test_gpus_of_a_host_are_listed_only_if_each_of_its_ranks_has_one() -> None:
    mixed = [*places("a"), *places("a", gpus=False)]
    assert rank_specs.all_placements(mixed, use_gpu=True)[0].local_gpus == ()


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


def test_checkpoint_settings_and_failure_policy_are_those_of_the_configuration() -> None:
    config = load(
        checkpoint={"every_steps": 7, "asynchronous": False},
        failure={"grace_s": 4, "max_restarts": 3, "hang_timeout_s": 8, "lost_after_s": 40},
    ).config
    assert rank_specs.checkpointing(config) == Checkpointing(
        config.checkpoint.every_epochs, 7, None, asynchronous=False
    )
    assert rank_specs.supervision(config) == Supervision(4.0, 2.0, 3, system_every_s=5.0)


def test_built_in_workload_searches_no_folder_of_the_users(tmp_path: Path) -> None:
    code = rank_specs.code(load(tmp_path, params={"epochs": 2}))
    assert code == Code("ddptrain.workloads.petnames.train:train", os.getcwd(), {"epochs": 2}, built_in=True)


def test_built_in_workload_with_a_tracker_of_the_user_searches_their_folders(tmp_path: Path) -> None:
    code = rank_specs.code(load(tmp_path, tracking={"other": [{"name": "mine:Tracker"}]}))
    assert code.built_in and code.sys_path == (str(tmp_path), os.getcwd())


def test_function_of_the_user_is_searched_beside_the_file_first(tmp_path: Path) -> None:
    code = rank_specs.code(load(tmp_path, workload="mine:train"))
    assert (code.workload, code.built_in, code.is_script) == ("mine:train", False, False)
    assert code.sys_path == (str(tmp_path), os.getcwd())


def test_script_goes_along_as_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    script = {"script": "t.py", "args": ["--lr", "1"], "local_rank_arg": True}
    code = rank_specs.code(load(tmp_path, workload=script))
    assert (code.script, code.module, code.args, code.local_rank_arg) == ("t.py", "", ("--lr", "1"), True)
    assert code.is_script and code.params == {}


def test_copied_code_has_the_paths_of_the_copy_and_leaves_other_paths_alone() -> None:
    code = Code("m:f", "/home/p/sub", script="/home/p/t.py", sys_path=("/home/p", "/opt/lib"))
    moved = rank_specs.move_code(code, Path("/home/p"), "/cache/1", "1")
    assert moved == Code(
        "m:f", "/cache/1/sub", script="/cache/1/t.py", sys_path=("/cache/1", "/opt/lib"), content_hash="1"
    )
    relative = rank_specs.move_code(Code("m:f", "/home/p", script="t.py"), Path("/home/p"), "/cache/1", "1")
    assert relative.script == "t.py"


# --- specs of an attempt, with stand-ins for the cluster ---


class Bench:
    """Rank specs whose worker group notes what it brings to the workers."""

    def __init__(self, tmp_path: Path, *, embedded: bool = False, **fields: Any) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.told: list[str] = []
        cluster = {} if embedded else {"cluster": {"address": "tcp://h:1"}}
        resolved = load(tmp_path, **{**cluster, **fields.pop("config", {})})
        layout = SimpleNamespace(root=tmp_path / "runs" / "r")
        parts: dict[str, Any] = {
            "writer": Notes(self.notes, "writer", run_id="r", layout=layout),
            "worker_group": Notes(self.notes, "group", place=self.place, sealed=lambda specs, places: specs),
            "inputs": Notes(self.notes, "inputs", place=lambda group, places: [f"in-{p.rank}" for p in places]),
            "tracking": Notes(self.notes, "tracking", env={"A": "tracking", "B": "b"}, of=lambda place: None),
        }
        self.specs = rank_specs.RankSpecs(resolved, **parts, tell=self.told.append, full_traceback=True, **fields)

    def place(self, places: Any, folder: Path, files: Any, manifest: str, what: str) -> list[str]:
        return [f"{folder}@{place.rank}" for place in places]


CHECKPOINT: Any = SimpleNamespace(folder=Path("/c/step-3"), files=("a", "b"), step=3, epoch=1.0, metrics={})


def test_specs_of_an_attempt_have_their_places_inputs_and_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, embedded=True, config={"env": {"A": "own"}, "params": {"epochs": 2}})
    two = places("a", "b", gpus=False)
    specs = bench.specs.build(4, two, CHECKPOINT)
    assert [(spec.run_id, spec.attempt, spec.rank) for spec in specs] == [("r", 4, 0), ("r", 4, 1)]
    assert [spec.placement for spec in specs] == rank_specs.all_placements(two, use_gpu=True)
    assert [spec.code.inputs for spec in specs] == ["in-0", "in-1"]
    assert [spec.checkpointing.resume_from for spec in specs] == ["/c/step-3@0", "/c/step-3@1"]
    config = bench.specs.resolved.config
    for spec in specs:
        assert spec.env == {"A": "own", "B": "b"}
        assert spec.code.full_traceback and spec.code.params == {"epochs": 2}
        assert (spec.group.backend, spec.supervision) == ("gloo", rank_specs.supervision(config))
        assert (spec.prepare, spec.profile) == (config.prepare.model_dump(), None)
    brought = ("group.place", two, Path("/c/step-3"), ("a", "b"), MANIFEST, "the checkpoint")
    assert bench.notes[0] == brought


def test_first_attempt_brings_no_checkpoint_and_gpus_can_be_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path, embedded=True, config={"cluster": {"gpus": 0}})
    (spec,) = bench.specs.build(1, places("a"), None)
    assert spec.checkpointing.resume_from == "" and not spec.placement.use_gpu
    assert [call[0] for call in bench.notes] == ["inputs.place", "tracking.of"]


def test_ranks_of_an_evaluation_run_its_function_on_the_checkpoints_and_are_not_profiled(tmp_path: Path) -> None:
    plan = EvaluationPlan("m:score", {"new": CHECKPOINT})
    config = {"params": {"epochs": 2}, "profile": {"steps": [3, 5]}}
    profiled = Bench(tmp_path, embedded=True, config=config).specs.build(1, places("a"), None)[0].profile
    assert profiled is not None
    specs = Bench(tmp_path, embedded=True, config=config, evaluation=plan).specs.build(1, places("a", "b"), None)
    assert [spec.rank for spec in specs] == [0, 1]
    for rank, spec in enumerate(specs):
        assert spec.profile is None and spec.code.workload == RANK_FUNCTION
        assert spec.code.params == plan.rank_params({"epochs": 2}, {"new": f"/c/step-3@{rank}"})
        assert spec.code.inputs == f"in-{rank}"


class CodeUpload:
    """What the upload of the code would do; `roots` are the folders of the copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *roots: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.package = SimpleNamespace(folder=folder, names=["a", "b"], size_bytes=9, hash="hash")
        self.project = SimpleNamespace(folder=folder, file=folder / "m.py")
        monkeypatch.setattr(rank_specs, "project_of", lambda resolved: self.project)
        uploaded = SimpleNamespace(roots=list(roots), code="hash")
        monkeypatch.setattr(rank_specs, "pack", self._recorded("pack", self.package))
        monkeypatch.setattr(rank_specs, "upload_code", self._recorded("upload", uploaded))
        monkeypatch.setattr(rank_specs, "check_imports", self._recorded("check", None))

    def _recorded(self, name: str, answer: object) -> Callable[..., object]:
        def called(*given: object) -> object:
            self.calls.append((name, *given))
            return answer

        return called


def test_code_is_copied_to_workers_that_do_not_see_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = CodeUpload(monkeypatch, tmp_path, "/cache/1", "")
    bench = Bench(tmp_path, config={"workload": "m:train"})
    two = places("a", "b")
    first, second = bench.specs.build(1, two, None)
    assert (first.code.workdir, first.code.content_hash) == ("/cache/1", "hash")
    assert (second.code.workdir, second.code.content_hash) == (str(tmp_path), "")
    assert code.calls == [
        ("pack", tmp_path, [tmp_path / "runs"]),
        ("upload", bench.specs.worker_group, two, code.package, tmp_path / "m.py", 200.0, bench.specs.tell),
        ("check", bench.specs.worker_group, two, tmp_path / "m.py", [first.code.sys_path, second.code.sys_path]),
    ]
    assert first.code.sys_path[0] == "/cache/1" and second.code.sys_path[0] == str(tmp_path)
    (update,) = [call for call in bench.notes if call[0] == "writer.update"]
    assert update[1] == {"code": CodeRecord("hash", str(tmp_path), 2, 9)}
    bench.specs.build(2, two, None)
    assert [call[0] for call in code.calls] == ["pack", "upload", "check", "upload", "check"], "packed once for a run"


@pytest.mark.parametrize(
    ("embedded", "same_files", "folder", "has_project", "roots", "calls"),
    [
        (True, False, False, True, ("/c",), []),
        (False, True, False, True, ("/c",), []),
        (False, True, True, True, ("/c",), ["pack", "upload", "check"]),
        (False, False, False, True, ("/c",), ["pack", "upload", "check"]),
        (False, False, False, False, ("/c",), []),
        (False, False, False, True, ("",), ["pack", "upload"]),  # the worker sees the project
    ],
)
def test_code_stays_where_the_workers_see_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embedded: bool,
    same_files: bool,
    folder: bool,
    has_project: bool,
    roots: tuple[str, ...],
    calls: list[str],
) -> None:
    code = CodeUpload(monkeypatch, tmp_path, *roots)
    if not has_project:
        monkeypatch.setattr(rank_specs, "project_of", lambda resolved: None)
    config = {"workload": "m:train", **({"code": {"folder": str(tmp_path)}} if folder else {})}
    bench = Bench(tmp_path, embedded=embedded, config=config)
    (place,) = places("a")
    (spec,) = bench.specs.build(1, [dataclasses.replace(place, same_files=same_files)], None)
    assert [call[0] for call in code.calls] == calls
    assert bool(spec.code.content_hash) == ("check" in calls)
    assert any(call[0] == "writer.update" for call in bench.notes) == ("check" in calls)
