"""Records and files that processes exchange."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.config.rank_settings import TrackerSpec
from ddptrain.errors import ClusterError, UsageError
from ddptrain.protocol import commands
from ddptrain.protocol.commands import CommandError
from ddptrain.protocol.exec_env import (
    exec_only,
    leave_working_directory,
    names_working_directory,
    without_working_directory,
)
from ddptrain.protocol.rank_errors import read_error_file
from ddptrain.protocol.rank_spec import (
    FILE,
    HostSettings,
    RankSpec,
    StartingWeights,
    TrackingSpec,
    names_model,
    same_model,
    weights_in,
)
from tests.unit.specs import make_spec

# --- Rank specs as JSON: what is decoded, and what is refused with the name of the field ---


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


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        for name in path[:-1]:
            raw = raw[name]
        raw[path[-1]] = to

    return change


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000])
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="can't read the spec of a rank"):
        RankSpec.from_json(text)


@pytest.mark.parametrize(("change", "name"), [(_set("new", to=1), "new"), (_set("code", "new", to=1), "new")])
def test_field_of_another_version_is_named(change: Callable[[dict[str, Any]], None], name: str) -> None:
    raw = json.loads(FULL.to_json())
    change(raw)
    with pytest.raises(ClusterError, match=f"'{name}'.*driver and workers are of different versions"):
        RankSpec.from_json(json.dumps(raw))


# --- Any text is a command or refused ---


@given(st.text())
def test_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        assert commands.decode(text) == (text, None)
    except CommandError:
        assert text not in ("preempt", "stacks", "stop")


def test_input_carries_a_text() -> None:
    assert commands.decode('input "p x\\n"') == (commands.Command.INPUT, "p x\n")
    for wrong in ("input", "input 1", "input x", 'stop "x"', "stop ", 'noticed "x"', "input " + "[" * 100_000):
        with pytest.raises(CommandError):
            commands.decode(wrong)


# --- What torch elastic's record() writes down is read as a failure, once; what is odd is told as it stands ---


def test_record_of_torch_elastic_is_a_failure_as_of_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "ValueError: a: b", "extraInfo": extra}}))
    os.utime(path, ns=(5, 7))
    found = read_error_file(path)
    assert found is not None
    assert (found.time_ns, found.type, found.message, found.traceback) == (7, "ValueError", "a: b", "Traceback ...")
    assert read_error_file(path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"message": "died"}', "died"),
        ("no JSON", "no JSON"),
        ('{"message": {"message": null}}', "None"),
        ("[]", "[]"),
        ("[" * 100_000, "[" * 4_000),
    ],
)
def test_odd_file_is_told_as_it_stands(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    found = read_error_file(path)
    assert found is not None and found.message == message


# --- Where Python looks for modules: never in the working directory by accident ---


LIBRARY = os.path.dirname(os.__file__)


@pytest.mark.parametrize(
    ("path", "kept", "named"),
    [
        (":/a", "/a", True),
        ("/a:", "/a", True),
        ("/a::/b", "/a:/b", True),
        ("", "", False),
        ("/a", "/a", False),
    ],
)
def test_empty_entries_of_the_path_go_for_they_are_the_working_directory(path: str, kept: str, named: bool) -> None:
    environ = {"PYTHONPATH": path, "HOME": "/h"}
    assert names_working_directory(environ) == named
    assert without_working_directory(environ) == {"PYTHONPATH": kept, "HOME": "/h"}
    assert exec_only(environ) == {"PYTHONPATH": kept}


@pytest.mark.parametrize(
    ("variable", "before", "after"),
    [
        ("", ["HERE", "LIBRARY", "/site"], ["LIBRARY", "/site"]),
        (":/a", ["HERE", "HERE", "/a", "LIBRARY"], ["/a", "LIBRARY"]),
        ("", ["", "LIBRARY", "/site", "HERE"], ["LIBRARY", "/site", "HERE"]),
        ("HERE", ["HERE", "LIBRARY"], ["HERE", "LIBRARY"]),
        ("", ["/bin", "LIBRARY"], ["/bin", "LIBRARY"]),
    ],
    ids=["python -m", "empty entry", "editable installation", "named", "script"],
)
def test_working_directory_leaves_the_path_unless_it_was_named_or_installed(
    monkeypatch: pytest.MonkeyPatch, variable: str, before: list[str], after: list[str]
) -> None:
    def filled(entries: list[str]) -> list[str]:
        return [{"HERE": os.getcwd(), "LIBRARY": LIBRARY}.get(entry, entry) for entry in entries]

    monkeypatch.setenv("PYTHONPATH", variable.replace("HERE", os.getcwd()))
    monkeypatch.setattr(sys, "path", filled(before))
    leave_working_directory()
    assert sys.path == filled(after)


# --- Which values of params.weights name a model, and the record of the weights in a run's inputs ---


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("model:dogs@3", "model:dogs@champion", True),
        ("model:dogs@3", "model:dogs", True),
        ("model:dogs@3", "model:dogs@3", False),  # equal texts need no rule
        ("model:dogs@3", "model:dogs@4", False),
        ("model:dogs@3", "model:cats@champion", False),
        ("model:dogs@champion", "model:dogs@staging", False),
        ("model:dogs@3", "DEFAULT", False),
        (None, "model:dogs", False),
        ("model:dogs@3", None, False),
    ],
)
def test_alias_stands_for_the_version_that_was_recorded(before: object, now: object, expected: bool) -> None:
    assert same_model(before, now) is expected


def test_only_text_with_the_prefix_names_a_model() -> None:
    assert names_model("model:dogs@champion")
    assert not any(map(names_model, ("DEFAULT", "s3://model:x", "weights.pt", None, 3)))


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = StartingWeights("dogs", 3, "abc", ("pug", "husky"))
    record.write(tmp_path)
    assert StartingWeights.read(tmp_path) == record and record.reference == "model:dogs@3"
    (tmp_path / "weights.json").write_text('{"model": 3}')
    assert StartingWeights.read(tmp_path) is None
    assert StartingWeights.read(tmp_path / "none") is None


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    for inputs in (None, tmp_path):
        with pytest.raises(UsageError, match="the weights of the model are missing"):
            weights_in(inputs)
    (tmp_path / FILE).write_bytes(b"x")
    assert weights_in(tmp_path) == tmp_path / FILE
