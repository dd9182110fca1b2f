"""`wandb sync` as a process: its environment, what it prints, and its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ddptrain.tracking.wandb.sync_command import sync_environment, sync_logs
from tests.unit.worker.stubs import has_ended, until

KEY = "k" * 40


def test_environment_says_how_to_send_not_how_it_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "WANDB_MODE": "offline",
        "WANDB_RUN_ID": "x",
        "WANDB_CONFIG_DIR": "mine",
        "WANDB_API_KEY": KEY,
    }
    assert sync_environment(given) == {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONFIG_DIR": str(tmp_path / "mine"),
        "WANDB_API_KEY": KEY,
        "NO_COLOR": "1",
    }
    assert sync_environment({"WANDB_ERROR_REPORTING": "true"})["WANDB_ERROR_REPORTING"] == "true"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs in place of `python -P -m wandb sync`; to be filled with a shell script."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "cwd").mkdir()
    return program


def test_last_error_and_links_are_found_without_the_key(command: Path, tmp_path: Path) -> None:
    with command.open("a") as file:
        file.write(
            "echo '2025-01-01 ERROR first'\n"
            f"echo 'wandb: ERROR key {KEY} refused by http://me:hush@there/'\n"
            "echo 'wandb: ERROR Find detailed error logs at: /tmp/x'\n"
            "echo 'wandb: [offline-run-1/w1] View run pets at http://x/runs/w1'\n"
        )
    output = sync_logs([tmp_path / "log"], {"WANDB_API_KEY": KEY}, tmp_path / "cwd", 60.0)
    assert output.error == "key <left out> refused by http://<left out>@there/"
    assert output.urls == {"w1": "http://x/runs/w1"}


def test_command_runs_in_the_scratch_folder_with_its_own_folders(command: Path, tmp_path: Path) -> None:
    with command.open("a") as file:
        file.write('echo "Error: $PWD $TMPDIR $WANDB_DIR $*"\n')
    cwd = tmp_path / "cwd"
    output = sync_logs([Path("/log")], {"WANDB_DIR": "/of/the/user"}, cwd, 60.0)
    words = "-P -m wandb sync --include-online --include-synced /log"
    assert output.error == f"{cwd} {cwd} {cwd}/WANDB_DIR {words}"


def test_command_that_hangs_is_killed_with_its_children(command: Path, tmp_path: Path) -> None:
    with command.open("a") as file:
        file.write(f"sleep 600 & echo $! > {tmp_path}/child\nwait\n")
    began = time.monotonic()
    output = sync_logs([], {"PATH": "/usr/bin:/bin"}, tmp_path / "cwd", 1.0)
    assert time.monotonic() - began < 30
    assert (output.error, output.urls) == ("it was not done in 1 s", {})
    until(lambda: has_ended(int((tmp_path / "child").read_text())), "the child has ended")


def test_success_has_no_error(command: Path, tmp_path: Path) -> None:
    assert sync_logs([], {}, tmp_path / "cwd", 60.0).error == ""
