"""The cluster of a single run, without its worker; with ranks it is in tests/end_to_end."""

from __future__ import annotations

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
