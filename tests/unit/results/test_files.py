from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ddptrain.results.errors import ResultsError
from ddptrain.results.files import JsonLines, write_whole


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ResultsError, match=r"run\.json: No space left on device; free some space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_lines_are_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"a": float("nan"), "b": "ä\ud800"})
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"a": None, "b": "ä\ud800"}
    lines.close()
    lines.close()


def test_a_line_that_the_disk_has_no_room_for_is_not_half_there(tmp_path: Path) -> None:
    # A limit on the size of files is as good as a full disk; in a process of its own, as it can't be raised
    # again.
    script = """
import resource, signal, sys
from pathlib import Path
from ddptrain.results.files import JsonLines
from ddptrain.results.errors import ResultsError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
lines.append({"n": 1})
try:
    lines.append({"n": "x" * 200})
except ResultsError as error:
    print(error)
lines.append({"n": 2})
"""
    path = tmp_path / "a.jsonl"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert f"cannot write {path}: File too large" in done.stdout
    assert path.read_text() == '{"n":1}\n{"n":2}\n'
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
