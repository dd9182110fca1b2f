"""What the network, the disk and ranks gone wrong may hand us: it is taken, or refused with a declared error.

DDPTRAIN_HOSTILE_INPUTS says how many inputs are tried in all; without it some hundred of each kind, always the same.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.driver.transfer.transfer_queue import _file_name
from ddptrain.protocol import events
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import newest_verified, read_manifest, verify
from ddptrain.results.errors import CheckpointDamaged, ResultsError, UnsafePath
from ddptrain.results.layout import safe_relative, step_name, step_of, valid_run_id
from ddptrain.results.run import Run
from ddptrain.results.run_record import FailureRecord, RecordError, RunRecord
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.show import render

_TESTS = 7
_IN_ALL = int(os.environ.get("DDPTRAIN_HOSTILE_INPUTS", "0"))
EXAMPLES = settings(
    max_examples=max(1, -(-_IN_ALL // _TESTS)) if _IN_ALL else 120,
    derandomize=not _IN_ALL,
)

odd_numbers = st.sampled_from(
    [0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), float("nan"), float("inf"), 1e-320, -0.0]
)
odd_text = st.sampled_from(
    [
        "",
        " ",
        "\0",
        "\n",
        "..",
        ".",
        "/",
        "../x",
        "a/b",
        "\\",
        "\ud800",
        "\u202e",
        "é" * 300,
        "1e999",
        "null",
        "step-1",
        "-",
    ]
)
leaves = st.none() | st.booleans() | st.integers() | odd_numbers | odd_text | st.text(max_size=8) | st.floats()
odd = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> Any:
    """JSON data with some of its parts put out of shape, taken away, or added to."""
    data = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        spots = list(_spots(data))
        parent, key = draw(st.sampled_from(spots)) if spots else (None, None)
        what = draw(st.sampled_from(["other", "other", "other", "gone", "more"]))
        if parent is None:
            return draw(odd)
        if what == "other":
            parent[key] = draw(odd)
        elif what == "gone":
            del parent[key]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = draw(odd)
        else:
            parent.append(draw(odd))
    return data


def _spots(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested data, as container and key."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from _spots(value)


def as_bytes(data: Any) -> bytes:
    return json.dumps(data).encode("utf-8", "surrogatepass")


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: Any) -> bytes:
    """A JSON text that was damaged as data, or as text."""
    text = bytearray(as_bytes(draw(damaged(whole))))
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text)))
        cut = bool(draw(st.booleans()))
        text[at : len(text) if cut else at + 3] = draw(
            st.sampled_from([b"", b"\0", b"\xff", b"[" * 20_000, b"9" * 5000, b'"'])
        )
    return bytes(text)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is such a thing: thousands of examples are written."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


# --- what ranks tell ---

EVENTS: list[dict[str, Any]] = [
    {"event": "started", "time_ns": 1, "pid": 2, "host": "h", "environment": {"A": {"value": "1", "source": "user"}}},
    {"event": "metrics", "time_ns": 1, "values": {"a": 0.5, "b": 1}, "step": 3, "epoch": 1.5},
    {"event": "progress", "time_ns": 1, "done": 3, "total": None, "unit": "steps"},
    {
        "event": "checkpoint",
        "time_ns": 1,
        "step": 5,
        "staging": "checkpoint-0",
        "files": [{"name": "model.safetensors", "size_bytes": 1, "sha256": hashlib.sha256(b"w").hexdigest()}],
        "metrics": {"val/loss": 1.0},
        "epoch": 1.0,
    },
    {"event": "file", "time_ns": 1, "path": "a/b.txt", "staging": "file-1", "size_bytes": 3, "sha256": "ab"},
    {"event": "failure", "time_ns": 1, "type": "ValueError", "message": "m", "traceback": "t", "exit_code": 3},
    {"event": "stacks", "time_ns": 1, "main": ["a.py:1 f"], "sequence": 3, "state": ""},
    {"event": "note", "time_ns": 1, "message": "m", "level": "info"},
    {"event": "alert", "time_ns": 1, "message": "m"},
]


@EXAMPLES
@given(line=st.sampled_from(EVENTS).flatmap(damaged_bytes))
def test_event_line_is_an_event_that_can_be_sent_on_or_none(line: bytes) -> None:
    with suppress(events.EventFormatError):
        event = events.decode(line)
        assert events.encode(event).endswith(b"\n")


@EXAMPLES
@given(event=st.sampled_from([*EVENTS[1:2], *EVENTS[3:5]]).flatmap(damaged))
def test_event_of_a_rank_gone_wrong_is_written_or_refused(folder: Path, event: Any) -> None:
    try:
        decoded = events.decode(as_bytes(event))
    except events.EventFormatError:
        return
    with tempfile.TemporaryDirectory(dir=folder) as name, _writer(Path(name)) as writer:
        staged = Path(name) / "staged"
        staged.mkdir()
        (staged / "model.safetensors").write_bytes(b"w")
        with suppress(ResultsError):
            if isinstance(decoded, events.Metrics):
                writer.add_metrics([decoded], 0)
                writer.flush()
            elif isinstance(decoded, events.CheckpointSaved):
                writer.adopt_checkpoint(0, decoded, staged, CheckpointPolicy())
            elif isinstance(decoded, events.FileSaved):
                writer.adopt_file(decoded, staged / _file_name(decoded.staging))
        assert {path.name for path in Path(name).iterdir()} <= {"runs", "staged"}
        for path in Path(name).glob("runs/*/*.jsonl"):
            assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def _writer(folder: Path) -> RunWriter:
    return RunWriter.create(folder / "runs", "a-run", "n", "workload: m:f\n", "m:f")


# --- what lies on the disk ---

MANIFEST = {
    "schema": 1,
    "step": 3,
    "epoch": 1.0,
    "metrics": {"val/loss": 0.5},
    "world_size": 2,
    "versions": {"torch": "2"},
    "files": [{"name": "model.safetensors", "size_bytes": 1, "sha256": hashlib.sha256(b"w").hexdigest()}],
}


@EXAMPLES
@given(manifest=damaged_bytes(MANIFEST))
def test_manifest_vouches_for_its_checkpoint_or_is_passed_over(folder: Path, manifest: bytes) -> None:
    layout = Run(folder)
    checkpoint = layout.checkpoints_dir / "step-3"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes(b"w")
    (checkpoint / "checkpoint.json").write_bytes(manifest)
    said: list[str] = []
    found = newest_verified(layout, said.append)
    assert (found is None) == bool(said)
    if found is not None:
        assert found.description.isprintable()
        assert all((checkpoint / name).is_file() for name in found.files)
    for read in (verify, read_manifest):
        with suppress(CheckpointDamaged):
            read(checkpoint)


RECORD = json.loads(
    RunRecord(
        run_id="a-run",
        name="n",
        status="failed",
        exit_code=1,
        started_at="2026-01-01T00:00:00+00:00",
        ended_at="2026-01-01T00:01:00+00:00",
        duration_s=60.0,
        world_size=2,
        failure=FailureRecord(rank=1, host="h", kind="exception", message="m", log="l"),
        versions={"torch": "2"},
        last_metrics={"a": 0.5},
        checkpoints=("step-3",),
    ).to_json()
)
RECORD["attempts"] = [
    {"attempt": 1, "started_at": "", "world_size": 2, "ranks": [{"rank": 0, "host": "h", "exit": -9}]}
]


@EXAMPLES
@given(text=damaged_bytes(RECORD))
def test_run_json_is_read_and_shown_or_refused(folder: Path, text: bytes) -> None:
    with suppress(RecordError):
        record = RunRecord.from_json(text)
        assert RunRecord.from_json(record.to_json()).run_id == record.run_id
    root = folder / "a-run"
    root.mkdir(exist_ok=True)
    (root / "run.json").write_bytes(text)
    view = Run(root)
    assert json.dumps(view.as_dict(), allow_nan=False)
    assert render.rows([view]) and render.sections(view)


# --- paths, names and orders ---


@EXAMPLES
@given(
    path=st.lists(
        odd_text | st.text(max_size=4) | st.sampled_from(["a", "con", ".incoming-x", "x" * 201]), max_size=4
    ).map("/".join)
)
def test_path_stays_below_its_folder_or_is_refused(folder: Path, path: str) -> None:
    with suppress(UnsafePath):
        taken = folder / safe_relative(path)
        assert taken != folder and taken.resolve().is_relative_to(folder.resolve())
        taken.parent.mkdir(parents=True, exist_ok=True)  # the file system can hold it
        taken.exists()
    with suppress(UnsafePath):
        assert (folder / _file_name(path)).parent == folder
    assert not valid_run_id(path) or (folder / path).parent == folder
    step = step_of(path)
    assert step is None or step_of(step_name(step)) == step
