"""Errors of the command line's parser have the format of all errors: one line, the value, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.cli.main import main


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train", "CONFIG is missing: write ddptrain train [OPTIONS] CONFIG; see ddptrain train --help"),
        ("trian x", 'there is no command "trian" (did you mean train?); see ddptrain --help'),
        ("xyzzy", 'there is no command "xyzzy"; see ddptrain --help'),
        ("results shw", 'there is no command "shw" (did you mean show?); see ddptrain results --help'),
        ("train x --rank 2", "there is no option --rank (did you mean --ranks?); see ddptrain train --help"),
        ("train x --ranks two", '--ranks: must be a valid integer, got "two"; see ddptrain train --help'),
        ("train x --output yaml", "--output: 'yaml' is not one of 'auto', 'live', 'plain', 'json'; see ddptrain "),
        ("results prune --keep -1", '--keep: must be greater than or equal to 0, got "-1"; see ddptrain results '),
        ("train a b", "got unexpected extra argument (b); see ddptrain train --help"),
        (
            "train a epochs=3",
            "got unexpected extra argument (epochs=3) (did you mean --set params.epochs=3?); see ddptrain ",
        ),
        ("train x --epochs 3", "there is no option --epochs (a field is changed as --set params.epochs=VALUE); see "),
        (
            "train x --batch-size 3",
            "there is no option --batch-size (a field is changed as --set params.batch_size=VALUE); ",
        ),
        ("train x --gpus 2", "there is no option --gpus (a field is changed as --set cluster.gpus=VALUE); see "),
        (
            "train x --max-restarts 2",
            "there is no option --max-restarts (a field is changed as --set failure.max_restarts=",
        ),
        (
            "run --lr 0.1 x.py",
            "there is no option --lr (arguments of the script come after it: SCRIPT --lr ...); see ",
        ),
        ("resume latest", 'there is no command "resume" (did you mean ddptrain train CONFIG --resume RUN?); see '),
        ("registry", 'there is no command "registry" (did you mean ddptrain models?); see ddptrain --help'),
        ("results resume", 'there is no command "resume"; see ddptrain results --help'),
        ("train.yaml", 'there is no command "train.yaml" (did you mean ddptrain train train.yaml?); see ddptrain --'),
        ("train.py", 'there is no command "train.py" (did you mean ddptrain run train.py?); see ddptrain --help'),
        ("schedule x.yaml", 'there is no command "x.yaml" (did you mean ddptrain schedule add x.yaml?); see ddptrain '),
        ("models x.yaml", 'there is no command "x.yaml"; see ddptrain models --help'),
    ],
)
def test_parser_errors_are_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ddptrain: error: {message}")
    assert printed.err.count("\n") == 1


def test_with_json_the_error_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "x", "--rank", "2", "--output", "json"]) == 2
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert "--rank" in event["message"]


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: ddptrain" in "".join(capsys.readouterr())


@pytest.mark.parametrize("address", ["tcp://host:notaport", "ssh://host", "tls://host"])
def test_wrong_address_of_a_cluster_is_no_scheduler_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "petnames", "--cluster", address]) == 2
    said = capsys.readouterr().err
    assert f"--cluster {address}: " in said
    assert "is not a scheduler's address: expected something like tcp://host:8786" in said
    assert not (tmp_path / "runs").exists()
