from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ddptrain.results.compare.differences import differing, find_differences, flat
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import AttemptRecord, CodeRecord, GitRecord, RankRecord, RunRecord


def put(folder: Path, run_id: str, config: str = "", manifest: str = "", **fields: Any) -> RunView:
    layout = RunLayout(folder / run_id)
    layout.inputs_dir.mkdir(parents=True)
    layout.config_yaml.write_text(config)
    if manifest:
        (layout.inputs_dir / "manifest.json").write_text(manifest)
    return RunView(layout, dataclasses.replace(RunRecord(run_id=run_id, status="succeeded"), **fields))


def test_only_what_differs_is_found(tmp_path: Path) -> None:
    ranks = (RankRecord(0, host="h1", gpu="0"), RankRecord(1, host="h2"))
    one = put(
        tmp_path,
        "a",
        "name: n\nparams: {layers: 9}\ndist: {backend: gloo, timeout_s: 1}",
        "[1]",
        params={"layers": 1, "opt": {"lr": 0.1, "wd": 0}},
        git=GitRecord("a" * 40, dirty=False),
        versions={"torch": "2.6", "python": "3.11"},
    )
    other = put(
        tmp_path,
        "b",
        "name: n\nparams: {layers: 9}\ndist: {backend: nccl, timeout_s: 1}",
        "[2]",
        params={"layers": 1, "opt": {"lr": 0.2, "wd": 0}, "new": None},
        git=GitRecord("b" * 40, dirty=True),
        code=CodeRecord("c" * 64, files=3),
        versions={"torch": "2.7", "python": "3.11"},
        attempts=(AttemptRecord(ranks=ranks),),
        world_size=2,
    )
    assert find_differences([one, other]) == {
        "params": {"opt.lr": [0.1, 0.2]},
        "config": {"dist.backend": ["gloo", "nccl"]},
        "code": {
            "git commit": ["a" * 12, "b" * 12],
            "uncommitted changes": [False, True],
            "uploaded code": [None, "c" * 12],
            "uploaded files": [None, 3],
        },
        "data": {"manifest.json": ["sha256 080a9ed42855", "sha256 038966de9f6b"]},
        "versions": {"torch": ["2.6", "2.7"]},
        "environment": {"ranks": [0, 2], "hosts": [[], ["h1", "h2"]], "GPUs": [0, 1]},
    }


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    views = [put(tmp_path, name, "name: n", "[1]", params={"layers": 1}) for name in "ab"]
    assert all(not found for found in find_differences(views).values())


def test_run_without_a_folder_of_inputs_has_no_data(tmp_path: Path) -> None:
    views = [put(tmp_path, name, "name: n", "[1]") for name in "ab"]
    (views[1].layout.inputs_dir / "manifest.json").unlink()
    views[1].layout.inputs_dir.rmdir()
    assert find_differences(views)["data"] == {"manifest.json": ["sha256 080a9ed42855", None]}


def test_values_are_compared_with_their_types() -> None:
    assert differing([{"a": 1, "b": True, "c": [1]}, {"a": 1, "b": 1, "c": [1]}]) == {"b": [True, 1]}


def test_nested_values_have_dotted_names() -> None:
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [1, 2], 3: "x"})) == {"a.b": 1, "a.c": {}, "d": [1, 2], "3": "x"}


def test_a_configuration_that_explodes_is_cut() -> None:
    bomb: dict[str, Any] = {"end": 1}
    for _ in range(20):
        bomb = {str(number): bomb for number in range(10)}
    assert len(list(flat(bomb))) == 5_000
