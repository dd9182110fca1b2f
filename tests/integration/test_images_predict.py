"""`ddptrain predict` as a process, with a run and images in a real object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.integration.s3server import s3_server
from tests.unit.workloads.pictures import COLOURS, picture


@pytest.mark.slow
def test_a_run_in_a_store_classifies_images_there_and_here(run_cli: Cli, tmp_path: Path) -> None:
    from tests.unit.workloads.images_runs import description, make_run, model_of_colours  # imports torch

    bucket = tmp_path / "buckets" / "colours"
    make_run(bucket / "runs" / "colours-20260101-000000-abcd", description(), (3, 0.5, model_of_colours(description())))
    here = tmp_path / "here"
    for folder in (bucket / "pictures" / "some", here):
        folder.mkdir(parents=True)
        for colour in COLOURS:
            (folder / f"{colour}.jpg").write_bytes(picture(colour, form="JPEG"))
    (here / "broken.jpg").write_bytes(picture("red", form="JPEG")[:200])
    (bucket / "pictures" / "broken.jpg").write_text("no image")
    stored = "s3://colours/pictures"
    with s3_server(tmp_path) as server:
        done = run_cli(
            *("predict", "latest", "here", "gone.jpg", stored, f"{stored}/some/red.jpg", f"{stored}/gone.jpg"),
            *("--runs-dir", "s3://colours/runs", "--json", "--top", "1", "--batch-size", "4", "--device", "cpu"),
            env={**server.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
    assert done.rc == 1, done.stderr
    assert done.stderr == "predict: 4 of 11 could not be classified\n"
    told = json.loads(done.stdout)
    assert (told["run_id"], told["checkpoint"]) == ("colours-20260101-000000-abcd", "step-3")
    seen = {one["file"]: one["predictions"][0]["class"] for one in told["results"] if "predictions" in one}
    assert seen == {
        **{f"here/{colour}.jpg": colour for colour in COLOURS},
        **{f"{stored}/some/{colour}.jpg": colour for colour in COLOURS},
    }
    errors = [(one["file"], one["error"]) for one in told["results"] if "error" in one]
    assert [file for file, _ in errors] == [
        "here/broken.jpg",
        "gone.jpg",
        f"{stored}/broken.jpg",
        f"{stored}/gone.jpg",
    ]
    assert errors[3][1] == "it is not there"
