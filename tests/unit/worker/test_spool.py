"""Why a rank's files take nothing more."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from ddptrain.worker.spool import RankSpool


@pytest.fixture
def spool(tmp_path: Path) -> RankSpool:
    made = RankSpool(tmp_path / "rank-0")
    made.create()
    return made


def test_events_at_the_limit_on_the_size_of_files_are_the_reason(
    spool: RankSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.events.write_bytes(b"x" * 4096)
    limits = {"now": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits["now"], -1))
    assert spool.why_unwritable() == ""
    limits["now"] = 4097
    assert spool.why_unwritable() == ""
    limits["now"] = 4096
    assert spool.why_unwritable() == (
        "its events or log have reached the limit on the size of files, 4,096 bytes; raise it: ulimit -f"
    )


def test_full_disk_is_the_reason(spool: RankSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = list(os.statvfs(spool.folder))
    now[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(now))
    assert spool.why_unwritable() == f"the disk of {spool.folder} is full"
