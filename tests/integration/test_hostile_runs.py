"""A run directory of somebody else controls no terminal, whatever stands in it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S

ESC = "\x1b"
# A title, the clipboard, the screen, blinking, C1, and text that runs backwards.
EVIL = f"{ESC}]0;pwned\x07{ESC}]52;c;cm0gLXJm\x07{ESC}[2J{ESC}[5m\x9b31m\u202e\u200b\x08\x7f"
OURS = re.compile(r"\x1b\[(?!5m)[0-9;]*m")  # colours, of rich and of charts
UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u202a-\u202e]")


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """The folder of runs that holds one run, which has ended; returns the run's id."""
    run_id = "evil-20260101-000000-abcd"
    folder = tmp_path / "runs" / run_id
    for name in ("logs", "checkpoints", "artifacts"):
        (folder / name).mkdir(parents=True)
    record = {
        "schema": 1,
        "run_id": run_id,
        "name": "evil" + EVIL,
        "workload": "work" + EVIL,
        "status": "failed" + EVIL,
        "exit_code": 1,
        "started_at": "2026-01-01T00:00:00Z",
        "ended_at": "2026-01-01T00:00:01Z",
        "world_size": 1,
        "attempts": [{"attempt": 1, "outcome": EVIL, "ranks": [{"rank": 0, "host": "host" + EVIL, "gpu": EVIL}]}],
        "failure": {"rank": 0, "host": EVIL, "kind": EVIL, "type": EVIL, "message": "told" + EVIL, "traceback": EVIL},
        "versions": {"torch" + EVIL: EVIL},
        "rank_environment": {"A" + EVIL: {"value": EVIL, "source": EVIL}},
        "driver": {"pid": 1, "host": "elsewhere" + EVIL},
        "last_metrics": {"val/loss" + EVIL: 0.5},
        "best": {"metric": "val/loss" + EVIL, "mode": "min", "value": 0.5, "step": 1},
        "tracking": {"wandb" + EVIL: {"url": "https://there/" + EVIL, "mode": EVIL, "id": EVIL}},
        "result": {"text": EVIL},
    }
    (folder / "run.json").write_text(json.dumps(record))
    points = [{"time_s": step, "step": step, "rank": 0, "val/loss" + EVIL: 1 / step} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    (folder / "logs/rank-0.log").write_text(f"first{EVIL} line\tend\n{ESC}[31mred{ESC}[0m\nbar 10%\rbar 20%{ESC}[K\n")
    (folder / "logs/rank-1.log").write_text(f"unfinished {EVIL}")
    (folder / "artifacts" / f"file{ESC}[2J.txt").write_text("x")
    (folder / "config.yaml").write_text("name: evil\n")
    return run_id


def in_pipe(command: list[str], folder: Path) -> str:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / ".state")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=PATIENCE_S, check=False)
    return (done.stdout + done.stderr).decode()


def in_terminal(command: list[str], folder: Path) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "XDG_STATE_HOME": str(folder / ".state"), "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    data = b""
    try:
        while block := os.read(ours, 1 << 16):
            data += block
    except OSError:  # what a terminal gives for the end
        pass
    finally:
        os.close(ours)
        process.wait(PATIENCE_S)
    return data.decode().replace("\r\n", "\n")


COMMANDS = [
    (["results", "list"], "evil-2026"),
    (["results", "show", "latest"], "told"),
    (["results", "logs", "latest"], "first31m line\tend"),
    (["results", "logs", "latest", "--rank", "0", "--follow"], "red\nbar 20%"),
    (["results", "compare", "latest"], "val/loss"),
    (["results", "compare", "latest", "--metric", "nothing"], "no metric"),
    (["results", "sync", "latest"], "evil-2026"),
    (["stop", "latest"], "told"),
    (["results", "show", "latest", "--json"], "told"),
]


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[" ".join(command) for command, _ in COMMANDS])
@pytest.mark.parametrize("way", [in_pipe, in_terminal])
def test_no_control_character_of_a_run_reaches_the_reader(
    hostile: str, tmp_path: Path, way: object, command: list[str], expected: str
) -> None:
    run = [hostile if word == "latest" else word for word in command]
    said = (in_pipe if way is in_pipe else in_terminal)([sys.executable, "-m", "ddptrain", *run], tmp_path)
    shown = OURS.sub("", said)
    assert expected.replace("\t", " ") in shown.replace("\t", " "), said
    assert UNSAFE.search(shown) is None, ascii(said)
    assert ESC not in (said if way is in_pipe else shown)
