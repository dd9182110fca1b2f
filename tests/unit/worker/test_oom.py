"""An out-of-memory kill is distinguished from any other SIGKILL by the counters of control groups (version 1 and 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.worker.process_monitor import MemoryWatch, groups_of

GIB = 1 << 30


class Machine:
    """A fake /proc and /sys/fs/cgroup. The rank is process 7."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        (self.proc / "7").mkdir(parents=True)
        self.put(self.proc / "vmstat", "pgfault 3\noom_kill 0\n")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, version: int, path: str, *, kills: int, limit: str) -> None:
        if version == 2:
            self.put(self.proc / "7" / "cgroup", f"0::/{path}\n")
            folder, names = self.root / path, ("memory.events", "memory.max")
        else:
            self.put(self.proc / "7" / "cgroup", f"5:cpu,cpuacct:/x\n4:memory:/{path}\n0::/\n")
            folder = self.root / "memory" / path
            names = ("memory.oom_control", "memory.limit_in_bytes")
        for name, text in zip(names, (f"oom 9\noom_kill {kills}\n", f"{limit}\n"), strict=True):
            self.put(folder / name, text)

    def watch(self) -> MemoryWatch:
        return MemoryWatch(7, self.root, self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_the_group_that_has_counted_a_kill_is_named(machine: Machine, version: int) -> None:
    machine.group(version, "jobs/a", kills=1, limit=str(2 * GIB))
    watch = machine.watch()
    assert watch.explain_kill() == ""
    machine.group(version, "jobs/a", kills=2, limit=str(2 * GIB))
    assert watch.explain_kill() == "out of memory (the memory limit of 2.0 GiB of its control group)"


def test_kill_in_a_group_without_a_limit_means_that_the_host_was_out_of_memory(machine: Machine) -> None:
    machine.group(2, "jobs/a", kills=0, limit="max")
    watch = machine.watch()
    machine.group(2, "jobs/a", kills=1, limit="max")
    assert watch.explain_kill() == "out of memory (the host's)"


def test_kill_elsewhere_on_the_host_makes_it_likely(machine: Machine) -> None:
    watch = machine.watch()
    machine.put(machine.proc / "vmstat", "oom_kill 1\n")
    assert watch.explain_kill().startswith("likely out of memory (the kernel has killed")


def test_no_explanation_without_a_sign_of_a_memory_shortage(machine: Machine) -> None:
    machine.group(2, "a", kills=3, limit=str(2 * GIB))
    watch = machine.watch()
    assert watch.explain_kill() == ""


def test_machine_without_counters_is_no_error(tmp_path: Path) -> None:
    watch = MemoryWatch(7, tmp_path / "none", tmp_path / "none")
    assert (groups_of(7, tmp_path, tmp_path), watch.explain_kill()) == ([], "")
