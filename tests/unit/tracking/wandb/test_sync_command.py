"""`wandb sync` as a process: its environment, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.tracking.wandb.sync_command import SyncOutput, WandbProcesses, sync_environment
from ddptrain.tracking.wandb.wandb_folders import RunPart

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


def test_last_error_and_address_are_found_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"  # runs in place of `python -P -m wandb sync`
    program.write_text(
        "#!/bin/sh\necho '2025-01-01 ERROR first'\n"
        f"echo 'wandb: ERROR key {KEY} refused by http://me:hush@there/'\n"
        "echo 'wandb: ERROR Find detailed error logs at: /tmp/x'\n"
        "echo 'wandb: [p/w1] View run pets at http://x/me/p/runs/w1'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "scratch").mkdir()
    part = RunPart(tmp_path, tmp_path / "run-w1.wandb", "w1", "", offline=True)
    output = WandbProcesses({"WANDB_API_KEY": KEY}, print).sync(part, tmp_path / "scratch", 60.0)
    assert output == SyncOutput("key <left out> refused by http://<left out>@there/", "http://x/me/p/runs/w1")
