"""Runs on the disk, and staged checkpoints to bring home."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ddptrain.protocol.events import CheckpointSaved, FileSaved, StagedFile
from ddptrain.results.run_writer import RunWriter

Stage = Callable[..., tuple[CheckpointSaved, Path]]

_DRIVER = """
import sys, time
from pathlib import Path
from ddptrain.results.run_writer import RunWriter
writer = RunWriter.create(Path(sys.argv[1]), sys.argv[2], "n", "", "w", world_size=2)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    """The writer of a run that is under way in tmp_path/runs."""
    with RunWriter.create(tmp_path / "runs", "a-run", "petnames", "name: petnames\n", "petnames") as made:
        yield made


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Stages a checkpoint as a rank does: `stage(step, {"val/loss": x})`."""

    def make(
        step: int,
        metrics: Mapping[str, float] | None = None,
        contents: Mapping[str, bytes] | None = None,
    ) -> tuple[CheckpointSaved, Path]:
        folder = tmp_path / f"staged-{step}-{time.monotonic_ns()}"
        folder.mkdir()
        files = []
        for name, data in (contents or {"model.safetensors": b"w" * 1000, "state.pt": b"s"}).items():
            (folder / name).write_bytes(data)
            files.append(StagedFile(name, len(data), hashlib.sha256(data).hexdigest()))
        return CheckpointSaved(time.time_ns(), step, folder.name, tuple(files), None, metrics or {}), folder

    return make


@pytest.fixture
def stage_file(tmp_path: Path) -> Callable[[str, bytes], tuple[FileSaved, Path]]:
    """Stages a file as a rank does: `stage_file("names.json", data)`."""

    def make(path: str, data: bytes) -> tuple[FileSaved, Path]:
        source = tmp_path / f"staged-file-{time.monotonic_ns()}"
        source.write_bytes(data)
        event = FileSaved(time.time_ns(), path, source.name, len(data), hashlib.sha256(data).hexdigest())
        return event, source

    return make


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that holds a run of tmp_path/runs until it is killed: `driver("a-run")`."""
    started: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _DRIVER, str(tmp_path / "runs"), run_id]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
