"""What the driver prepares once for all ranks: a process of its own, a folder, and copies where it is not seen."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.transfer.inputs import CONTENTS, RunInputs
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError, ExitCode, UsageError
from ddptrain.protocol.rank_spec import Placement
from ddptrain.worker import driver_calls
from ddptrain.worker.spool import write_chunk
from tests.support.command import wait_until
from tests.unit.worker.stubs import has_ended

PREPARES = """
import os, sys, time
from ddptrain.errors import ClusterError, UsageError

def writes(params, folder, tell):
    print("noise")
    tell(f"{os.environ['GREETING']} {params['name']}")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "more.bin").write_bytes(bytes(3_000_000))

def refuses(params, folder, tell):
    raise UsageError("no such thing")

def unreachable(params, folder, tell):
    raise ClusterError("it does not answer")

def full(params, folder, tell):
    raise OSError(28, "No space left on device", str(folder))

def buggy(params, folder, tell):
    return 1 / 0

def dies(params, folder, tell):
    os.kill(os.getpid(), 9)

def looks(params, folder, tell):
    tell("looked")

def sleeps(params, folder, tell):
    tell(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[str], RunInputs]:
    (tmp_path / "prepares.py").write_text(PREPARES)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "GREETING": "hello"}

    def begin(function: str) -> RunInputs:
        inputs = RunInputs(f"prepares:{function}" if function else "", tmp_path / "inputs")
        inputs.begin({"name": "images"}, environ)
        return inputs

    return begin


def test_a_workload_fills_the_folder_with_the_environment_of_the_run(
    tmp_path: Path, begun: Callable[[str], RunInputs]
) -> None:
    inputs, said = begun("writes"), list[str]()
    inputs.wait(said.append)
    inputs.wait(said.append)
    assert said == ["hello images"]
    contents = json.loads((tmp_path / "inputs" / CONTENTS).read_text())
    assert {name: file["size_bytes"] for name, file in contents["files"].items()} == {
        "list.json": 6,
        "more.bin": 3_000_000,
    }


def test_a_workload_that_prepares_nothing_has_no_folder(tmp_path: Path, begun: Callable[[str], RunInputs]) -> None:
    inputs = begun("")
    inputs.wait(pytest.fail)
    inputs.close()
    assert not (tmp_path / "inputs").exists()
    assert inputs.place(cast("Workers", None), [cast("RankPlace", None)] * 2) == ["", ""]


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("refuses", UsageError, "^no such thing$"),
        ("unreachable", ClusterError, "^it does not answer$"),
        ("full", ClusterError, "No space left on device"),
        ("buggy", RuntimeError, "ZeroDivisionError"),
        ("dies", ClusterError, "has ended with -9"),
        ("is_not_there", RuntimeError, "AttributeError"),
    ],
)
def test_what_goes_wrong_there_is_raised_here(
    tmp_path: Path, begun: Callable[[str], RunInputs], function: str, kind: type[Exception], words: str
) -> None:
    inputs = begun(function)
    with pytest.raises(kind, match=words) as caught:
        inputs.wait(pytest.fail)
    inputs.close()
    assert not (tmp_path / "inputs").exists()
    assert type(caught.value) is kind
    assert kind is not UsageError or caught.value.exit_code == ExitCode.USAGE  # type: ignore[attr-defined]


def test_closing_ends_the_process(begun: Callable[[str], RunInputs]) -> None:
    inputs = begun("sleeps")

    def close(pid: str) -> None:
        os.kill(int(pid), 0)
        raise InterruptedError(pid)

    with pytest.raises(InterruptedError) as caught:
        inputs.wait(close)
    inputs.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(caught.value)), 0)


def test_the_process_ends_with_a_driver_that_is_killed(tmp_path: Path, begun: Callable[[str], RunInputs]) -> None:
    begun("").close()
    code = f"""
from pathlib import Path
from ddptrain.driver.transfer.inputs import RunInputs
inputs = RunInputs("prepares:sleeps", Path({str(tmp_path / "inputs")!r}))
inputs.begin({{}}, {{**__import__("os").environ, "PYTHONPATH": {str(tmp_path)!r}}})
inputs.wait(lambda pid: print(pid, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(pid), "the end of a process that has outlived its driver")


def write(path: Path, offset: int, data: bytes) -> str:
    """Write bytes of a file as a worker does; return its path there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return str(path)


class Elsewhere:
    """A Dask client whose workers `far` have a file system of their own, below `root`."""

    def __init__(self, root: Path, far: set[str]) -> None:
        self.root, self.far = root, far
        self.scheduler = SimpleNamespace(address="tcp://s")

    def run(self, function: object, *words: Any, workers: list[str], on_error: str = "") -> dict[str, Any]:
        if function is driver_calls.holds_file:
            return {worker: worker not in self.far and Path(words[0]).read_text() == words[1] for worker in workers}
        assert function is driver_calls.write_spool
        _, path, offset, data = words
        return {worker: write_chunk(self.root / worker / path, offset, data) for worker in workers}


def test_a_worker_that_sees_another_file_system_gets_a_copy(tmp_path: Path, begun: Callable[[str], RunInputs]) -> None:
    inputs = begun("writes")
    inputs.wait(lambda line: None)
    client = Elsewhere(tmp_path / "far", {"w2"})
    worker_group = Workers(cast("Any", client), "run", queue.SimpleQueue())
    places = [
        RankPlace(rank, Placement(1, rank, 1, 0, 0), Slot(worker, "host", 0, False, True), "host", tmp_path)
        for rank, worker in enumerate(["w1", "w2", "w1"])
    ]
    own, copy, again = inputs.place(worker_group, places)
    assert own == again == str(tmp_path / "inputs")
    assert Path(copy).is_relative_to(tmp_path / "far" / "w2")
    for name in ("list.json", "more.bin", CONTENTS):
        assert (Path(copy) / name).read_bytes() == (Path(own) / name).read_bytes()
