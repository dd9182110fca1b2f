"""`ddptrain predict` as a process, with a run in a real object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.servers.s3server import s3_server
from tests.unit.workloads.pictures import COLOURS, picture


@pytest.mark.slow
def test_a_run_in_a_store_classifies_images_here(run_cli: Cli, tmp_path: Path) -> None:
    from tests.unit.workloads.images_runs import description, make_run, model_of_colours  # imports torch

    bucket = tmp_path / "buckets" / "colours"
    make_run(bucket / "runs" / "colours-20260101-000000-abcd", description(), (3, 0.5, model_of_colours(description())))
    here = tmp_path / "here"
    here.mkdir()
    for colour in COLOURS:
        (here / f"{colour}.jpg").write_bytes(picture(colour, form="JPEG"))
    (here / "broken.jpg").write_bytes(picture("red", form="JPEG")[:200])
    with s3_server(tmp_path) as server:
        done = run_cli(
            *("predict", "latest", "here", "gone.jpg", "s3://colours/pictures", "--runs-dir", "s3://colours/runs"),
            *("--json", "--top", "1", "--batch-size", "4", "--device", "cpu"),
            env={**server.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
    assert done.rc == 1, done.stderr
    assert done.stderr == "predict: 3 of 6 could not be classified\n"
    told = json.loads(done.stdout)
    assert (told["run_id"], told["checkpoint"]) == ("colours-20260101-000000-abcd", "step-3")
    seen = {one["file"]: one["predictions"][0]["class"] for one in told["results"] if "predictions" in one}
    assert seen == {f"here/{colour}.jpg": colour for colour in COLOURS}
    errors = [(one["file"], one["error"]) for one in told["results"] if "error" in one]
    assert [file for file, _ in errors] == ["here/broken.jpg", "gone.jpg", "s3://colours/pictures"]
    assert errors[2][1] == "predict takes files and folders; download it first"
