"""The lock of a model in a folder; tests/integration has the one in an object store."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddptrain.errors import RunLocked
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.storage.remote_folder import RemoteFolder

PATIENCE_S = 30.0
_OTHER = """
import sys, time
from pathlib import Path
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.storage.remote_folder import RemoteFolder

owner = ModelOwner(RemoteFolder(OwnFolder(Path(sys.argv[1]))), "names")
with owner.owned(0.0, print, lambda: None):
    print("owned", flush=True)
    time.sleep(60)
"""


def owner_in(folder: Path) -> ModelOwner:
    return ModelOwner(RemoteFolder(OwnFolder(folder / "models")), "names")


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _OTHER, str(folder / "models")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"owned\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def nothing(text: str = "") -> None:
    """Take no notice."""


def test_second_owner_is_refused_and_the_first_is_named_until_its_process_ends(tmp_path: Path) -> None:
    refused = pytest.raises(RunLocked, match=r"model names is being retrained by process \d+ on ")
    with other_process(tmp_path) as process:
        with refused, owner_in(tmp_path).owned(0.0, nothing, nothing):
            pass
        process.kill()
        process.wait()
        with owner_in(tmp_path).owned(0.0, nothing, nothing):
            pass
    with owner_in(tmp_path).owned(0.0, nothing, nothing):
        pass  # released


def test_wait_gives_up_in_time_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        owner_in(tmp_path).owned(0.0, nothing, nothing),
        pytest.raises(RunLocked, match=r"and did not end within 0.05 s"),
        owner_in(tmp_path).owned(0.05, said.append, nothing),
    ):
        pass
    assert len(said) == 1 and "waiting for its end" in said[0]


def test_model_is_owned_once_the_other_process_was_stopped(tmp_path: Path) -> None:
    with other_process(tmp_path) as process, owner_in(tmp_path).owned(PATIENCE_S, nothing, process.terminate):
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
