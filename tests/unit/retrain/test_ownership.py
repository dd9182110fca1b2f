"""The lock of a model in a folder; tests/integration has the one in an object store."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddptrain.errors import RunLocked
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.results.errors import ResultsError
from ddptrain.retrain import ownership
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError

PATIENCE_S = 30.0
_OTHER = """
import sys, time
from pathlib import Path
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.retrain import ownership
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.storage.remote_folder import RemoteFolder

ownership._LOOK_EVERY_S = 0.05
owner = ModelOwner(RemoteFolder(OwnFolder(Path(sys.argv[1]))), "names")
with owner.owned("skip", 0.0, print):
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


def silent(text: str) -> None:
    """Take no notice."""


def test_second_owner_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    refused = pytest.raises(RunLocked, match=r"model names is being retrained by process \d+ on ")
    with owner_in(tmp_path).owned("skip", 0.0, silent), refused:
        owner_in(tmp_path)._take("skip", 0.0, silent)
    with owner_in(tmp_path).owned("skip", 0.0, silent):
        pass  # released


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(RunLocked):
            owner_in(tmp_path)._take("skip", 0.0, silent)
        process.kill()
        process.wait()
        with owner_in(tmp_path).owned("skip", 0.0, silent):
            pass


def test_wait_gives_up_in_time_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_TRY_EVERY_S", 0.01)
    told: list[str] = []
    refused = pytest.raises(RunLocked, match=r"and did not end within 0.05 s")
    with owner_in(tmp_path).owned("skip", 0.0, silent), refused:
        owner_in(tmp_path)._take("wait", 0.05, told.append)
    assert len(told) == 1 and "waiting for its end" in told[0]


def test_wait_gets_the_model_once_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_TRY_EVERY_S", 0.01)
    told: list[str] = []

    def end_it(text: str) -> None:
        told.append(text)
        process.kill()

    with other_process(tmp_path) as process, owner_in(tmp_path).owned("wait", PATIENCE_S, end_it):
        assert len(told) == 1


def test_replace_ends_the_owner_like_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_TRY_EVERY_S", 0.01)
    told: list[str] = []
    with other_process(tmp_path) as process:
        heir = owner_in(tmp_path)
        with heir.owned("replace", PATIENCE_S, told.append):
            assert process.wait(PATIENCE_S) == -signal.SIGTERM
            assert "asked it to save and end" in told[0]
            assert not (tmp_path / "models" / "names" / "retrainings" / "replace").exists()
            assert heir.replaced_by == ""


def test_request_names_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_LOOK_EVERY_S", 0.01)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("ddptrain.retrain.ownership.os.kill", lambda pid, signum: sent.append((pid, signum)))
    owner = owner_in(tmp_path)
    with owner.owned("skip", 0.0, silent):
        (tmp_path / "models" / "names" / "retrainings" / "replace").write_bytes(b"process 7 on host\n")
        wait_for(lambda: bool(owner.replaced_by))
    assert owner.replaced_by == "process 7 on host"
    assert [signum for _, signum in sent] == [signal.SIGTERM]


def test_registry_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setattr("ddptrain.results.secure_files._is_our_id", lambda uid, path: False)
    with pytest.raises(StoreError, match=r"models: the folder belongs to another user"):
        owner_in(tmp_path)._take("skip", 0.0, silent)


def test_registry_that_cannot_be_written_is_not_called_a_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("ddptrain.results.secure_files.file_ops.open_regular", refuse)
    with pytest.raises(ResultsError, match=r"cannot write .*run.lock: Read-only file system; .* with --models-dir$"):
        owner_in(tmp_path)._take("skip", 0.0, silent)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
