"""`ddptrain predict` with the model of a run that tells colours apart."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from ddptrain.cli.main import main
from tests.servers.s3server import s3_server
from tests.unit.workloads.pictures import COLOURS, picture

RUN = "colours-20260101-000000-abcd"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.workloads.images_runs import description, make_run, model_of_colours  # imports torch

    model = model_of_colours(description())
    return make_run(tmp_path_factory.mktemp("trained") / RUN, description(), (3, 0.5, model))


@pytest.fixture
def folder(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the run and a picture of each colour."""
    shutil.copytree(trained, tmp_path / "runs" / RUN)
    (tmp_path / "pictures").mkdir()
    for colour in COLOURS:
        (tmp_path / "pictures" / f"{colour}.png").write_bytes(picture(colour))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_class_and_file_are_in_a_line_and_other_classes_below(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pictures" / "red\x1b[2J\n.png").write_bytes(picture("red"))
    assert main(["predict", "latest", "pictures", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    odd = ("red", "pictures/red\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}.png")
    plain = {(colour, f"pictures/{colour}.png") for colour in COLOURS}
    assert {(words[2], words[-1]) for words in lines[::2]} == plain | {odd}
    assert all(len(words) == 3 for words in lines[1::2]) and err == ""


def test_json_and_csv_have_what_can_not_be_read_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.jpg").write_bytes(picture("red", form="JPEG")[:200])
    given = ["predict", "latest", "pictures", "broken.jpg", "nowhere", "--top", "1", "--batch-size", "2"]
    assert main([*given, "--json", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["run_id"], told["checkpoint"]) == (RUN, "step-3")
    seen = {one["file"]: one["predictions"][0]["class"] for one in told["results"] if "predictions" in one}
    assert seen == {f"pictures/{colour}.png": colour for colour in COLOURS}
    assert [one["file"] for one in told["results"] if "error" in one] == ["broken.jpg", "nowhere"]
    assert err == "ddptrain: 2 of 5 could not be classified\n"
    assert main([*given, "--csv"]) == 1
    rows = [*csv.reader(io.StringIO(capsys.readouterr().out, newline=""))]
    assert rows[0] == ["file", "class", "probability", "error"]
    assert rows[-1] == ["nowhere", "", "", "no such file or folder"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latest"], "PATH is missing: write ddptrain predict [OPTIONS] RUN|MODEL PATH..."),
        (["latest", "nowhere"], "error: nowhere: no such file or folder"),
        (["none", "pictures"], 'error: no run "none" in runs'),
        (["latest", "pictures", "--json", "--csv"], "give --json or --csv, not both"),
        (["latest", "pictures", "--top", "0"], "--top: must be "),
        (["latest", "pictures", "--batch-size", "0"], "--batch-size: must be "),
        (["latest", "pictures", "--device", "tpu"], "--device: 'tpu' is not one of"),
    ],
)
def test_impossible_arguments_end_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["predict", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_latest_is_the_newest_run_that_can_classify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = folder / "runs" / "images-failed"
    failed.mkdir()
    record = {"run_id": failed.name, "status": "failed", "workload": "images", "started_at": "2099-01-01T00:00:00Z"}
    (failed / "run.json").write_text(json.dumps(record))
    assert main(["predict", "latest", "pictures/red.png", "--json", "--top", "1"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["run_id"] == RUN
    assert f"using run {RUN}: the newest of images with a checkpoint\n" in told.err


def test_run_in_a_store_classifies_images_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(folder / "runs", folder / "buckets" / "colours" / "runs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with s3_server(folder) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        words = ["pictures/red.png", "s3://colours/pictures", "--runs-dir", "s3://colours/runs", "--json"]
        assert main(["predict", "latest", *words]) == 1
    found, refused = json.loads(capsys.readouterr().out)["results"]
    assert found["predictions"][0]["class"] == "red"
    assert refused["error"] == "predict takes files and folders; download it first"
