"""Which GPUs are offered, with a command line stand-in for nvidia-smi."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(("cores", "slots"), [(1, 2), (2, 2), (5, 2), (16, 8)])
def test_machine_without_gpus_has_a_slot_for_every_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, slots: int
) -> None:
    monkeypatch.setattr(gpus, "usable_cores", lambda: cores)
    assert gpus.default_slots(()) == slots
    assert gpus.default_slots(("0", "1", "2")) == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system knows no CPU affinity")
def test_cores_of_others_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 4, 5, 6})
    assert gpus.usable_cores() == 4
