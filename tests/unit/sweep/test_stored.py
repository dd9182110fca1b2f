"""Sweeps in a store, here a folder with a URL: the pieces of the journal, and what another machine gets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.errors import ResultsError
from ddptrain.sweep.folder import last_source, open_sweeps
from ddptrain.sweep.records import SweepRecord
from ddptrain.sweep.stop import find_target, stop_sweep
from ddptrain.sweep.stored import StoredSweep, StoredSweeps
from tests.unit.results.stores import serve_folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store/sweeps"


@pytest.fixture
def sweeps(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredSweeps:
    on_machine(tmp_path / "first", monkeypatch)
    opened = open_sweeps(serve_folder(store.parent, monkeypatch) + "/sweeps")
    assert isinstance(opened, StoredSweeps)
    return opened


def on_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


def write(sweep: StoredSweep, lines: bytes) -> None:
    with sweep.journal.open("ab") as file:
        file.write(lines)
    sweep.cut_journal()
    assert sweep.upload(20.0) == ""


def pieces(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((store / "s" / "journal").iterdir())}


def test_the_journal_is_uploaded_in_pieces_and_another_machine_continues_it(
    sweeps: StoredSweeps, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sweeps.create("mine", "s") as sweep:
        SweepRecord("s", "mine", "mine.yaml", "2026-01-01T00:00:00Z").save(sweep.folder)
        write(sweep, b'{"a": 1}\n{"ha')
        write(sweep, b'lf": 2}\n')
        write(sweep, b"")
    assert pieces(store) == {f"{0:015d}.log": b'{"a": 1}\n', f"{9:015d}.log": b'{"half": 2}\n'}
    assert not sweep.folder.exists()

    on_machine(tmp_path / "second", monkeypatch)
    elsewhere = open_sweeps("s3://bucket/sweeps")
    assert elsewhere.find("mine", None) == elsewhere.find(None, "s") == "s"
    with elsewhere.resume("s") as again:
        assert again.journal.read_bytes() == b'{"a": 1}\n{"half": 2}\n'
        assert isinstance(again, StoredSweep)
        write(again, b"{}\n")
    assert list(pieces(store)) == [f"{offset:015d}.log" for offset in (0, 9, 21)]


def test_a_journal_with_a_missing_piece_is_refused(sweeps: StoredSweeps, store: Path) -> None:
    with sweeps.create("mine", "s") as sweep:
        write(sweep, b"{}\n")
        write(sweep, b"{}\n")
    (store / "s" / "journal" / f"{0:015d}.log").unlink()
    with pytest.raises(ResultsError, match=r"after 0 bytes comes 0+3\.log"), sweeps.resume("s"):
        pass


def test_names_that_are_taken_or_missing_are_refused(sweeps: StoredSweeps, store: Path) -> None:
    with sweeps.create("mine", "s") as sweep:
        SweepRecord("s", "mine", "mine.yaml", "2026-01-01T00:00:00Z").save(sweep.folder)
    with pytest.raises(UsageError, match="exists already; continue it with --resume"), sweeps.create("mine", "s"):
        pass
    with pytest.raises(RunNotFound, match="did you mean s"):
        sweeps.find(None, "ss")
    with pytest.raises(RunNotFound, match="no sweep named other"):
        sweeps.find("other", None)
    (store / "r").mkdir()
    (store / "r" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="is a run; choose another --sweep-id"), sweeps.create("mine", "r"):
        pass


def test_a_running_sweep_is_stopped_by_the_lock_of_its_working_folder(
    sweeps: StoredSweeps, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "s3://bucket/sweeps"
    assert find_target(place, "s") is None
    with sweeps.create("mine", "s") as sweep:
        SweepRecord("s", "mine", "mine.yaml", "2026-01-01T00:00:00Z").save(sweep.folder)
        write(sweep, b"{}\n")
        target = find_target("runs", f"{place}/s")
        assert target is not None and target.holder() == (os.getpid(), socket.gethostname())
        on_machine(tmp_path / "second", monkeypatch)
        elsewhere = find_target(place, "s")
        assert elsewhere is not None
        with pytest.raises(UsageError, match="can only be stopped on"):
            stop_sweep(elsewhere, now=False, tell=print)
    assert stop_sweep(target, now=False, tell=print)[1] is False


def test_a_start_that_was_killed_before_its_first_trial_leaves_nothing_in_the_way(
    sweeps: StoredSweeps, store: Path
) -> None:
    (store / "s" / "journal").mkdir(parents=True)
    (store / "s" / "journal" / f"{0:015d}.log").write_bytes(b"old\n")
    with sweeps.create("mine", "s") as sweep:
        write(sweep, b"new\n")
    assert pieces(store) == {f"{0:015d}.log": b"new\n"}


def test_a_store_does_not_choose_the_configuration_that_is_run(store: Path, sweeps: StoredSweeps) -> None:
    with sweeps.create("mine", "s") as sweep:
        SweepRecord("s", "mine", "/tmp/of-another-user.yaml", "2026-01-01T00:00:00Z").save(sweep.folder)
        write(sweep, b"{}\n")
    with pytest.raises(UsageError, match="name the configuration: ddptrain sweep CONFIG --resume"):
        last_source("s3://bucket/sweeps", "s")
