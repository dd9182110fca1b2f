"""The cluster of a single run, without its worker; with ranks it is in tests/end_to_end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.clusters.backends.embedded import EmbeddedCluster


def test_scheduler_has_ended_and_its_files_are_gone_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedCluster, "_introduce", lambda self: None)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    cluster = EmbeddedCluster(2, (), scratch, {})
    socket = Path(cluster.connect().address.removeprefix("unix://"))
    thread = cluster._thread
    assert socket.exists() and thread is not None and thread.is_alive()
    cluster.close()
    assert not thread.is_alive() and not socket.parent.exists() and not scratch.exists()


def test_other_users_cannot_put_modules_into_the_folder_that_dask_adds_to_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedCluster, "_introduce", lambda self: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.path}
    cluster = EmbeddedCluster(2, (), tmp_path / "scratch", {})
    private = Path(cluster.connect().address.removeprefix("unix://")).parent
    added = [Path(path) for path in sys.path if path not in before]
    cluster.close()
    assert added and all(path.is_relative_to(private) for path in added)
