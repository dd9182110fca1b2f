"""The slots of a machine that runs without a cluster share: GPUs, order, and what a driver leaves that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddptrain.clusters.machine_slots import MachineSlots
from ddptrain.clusters.scheduler.slots import Refusal

GPUS = ("0", "1", "2", "3")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def run(name: str) -> MachineSlots:
    return MachineSlots(name, GPUS)


def test_run_gets_gpus_that_no_other_run_holds() -> None:
    first, second, third = run("first"), run("second"), run("third")
    assert first.claim(2, ("0", "1"), in_line=False) == ("0", "1")
    assert second.claim(1, ("0",), in_line=True) == ("2",)
    assert third.claim(2, ("0", "1"), in_line=False) == ("0", "1"), "it does not wait, and the free ones are too few"
    second.release()
    third.release()
    assert third.claim(2, ("0", "1"), in_line=False) == ("2", "3")


def test_line_has_the_order_of_a_cluster_and_nobody_passes_the_first() -> None:
    holder, large, small, urgent = run("holder"), run("large"), run("small"), run("urgent")
    holder.claim(3, GPUS[:3], in_line=False)
    refused = large.claim(2, GPUS[:2], in_line=True)
    assert isinstance(refused, Refusal) and (refused.asked, refused.free, refused.total, refused.place) == (2, 1, 4, 1)
    assert [(name, count) for name, count, _ in refused.holders] == [("holder", 3)]
    behind = small.claim(1, ("0",), in_line=True)
    assert isinstance(behind, Refusal) and behind.place == 2
    assert urgent.claim(1, ("0",), 5, in_line=True) == ("3",)
    urgent.release()
    holder.release()
    assert isinstance(small.claim(1, ("0",), in_line=True), Refusal)
    assert large.claim(2, ("0", "1"), in_line=True) == ("0", "1")
    assert small.claim(1, ("0",), in_line=True) == ("2",)


def test_run_that_is_larger_than_the_machine_waits_until_it_has_all() -> None:
    small, large = MachineSlots("small", ()), MachineSlots("large", ())
    assert small.claim(1, (), in_line=False) == ()
    refused = large.claim(100_000, (), in_line=True)
    assert isinstance(refused, Refusal) and refused.asked == refused.total
    small.release()
    assert large.claim(100_000, (), in_line=True) == ()


def test_killed_driver_holds_nothing(state: Path) -> None:
    code = (
        "import os; from ddptrain.clusters.machine_slots import MachineSlots;"
        f"MachineSlots('killed', {GPUS}).claim(4, {GPUS}, in_line=False); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == -9
    assert list(state.glob("ddptrain/machine/*/killed-*.json"))
    assert run("next").claim(4, GPUS, in_line=True) == GPUS
    assert not list(state.glob("ddptrain/machine/*/killed-*.json"))
