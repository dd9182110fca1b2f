"""Which GPUs are offered, with a command line stand-in for nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain import gpus


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that lists two GPUs, and a driver that seems to be there."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 0\necho 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("os.path.exists", lambda path: True)
    return command


@pytest.mark.usefixtures("smi")
@pytest.mark.parametrize(
    ("chosen", "offered"),
    [
        (None, ("0", "1")),
        ("1", ("1",)),
        ("1, 0", ("1", "0")),
        ("", ()),
        ("-1", ()),
        ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd")),
    ],
)
def test_users_choice_wins_over_what_is_there(chosen: str | None, offered: tuple[str, ...]) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert gpus.visible_gpus(environ) == offered


def test_broken_nvidia_smi_offers_nothing(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert gpus.visible_gpus({}) == ()


def test_choice_without_a_driver_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == ()
