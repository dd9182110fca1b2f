"""A dozen of the chaos suite's cases, which `make chaos` has hundreds of: each kind of fault, each kind of moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.__main__ import run_all
from tests.chaos.table import cases

SEED = 20
CHOSEN = (
    "worker mid restart embedded",
    "server write own",
    "raise first 1 warm",
    "exit3 mid both warm",
    "segv rendezvous 0 warm",
    "os_exit0 end 1 warm",
    "kill write 0 warm",
    "kill mid 1 restart warm",
    "stop mid 1 warm",
    "term mid 0 warm",
    "driver_term write warm",
    "driver_kill home warm",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dozen_faults_are_told_leave_nothing_and_lose_nothing(tmp_path: Path) -> None:
    chosen = [one for words in CHOSEN for one in cases(SEED, 1, words)]
    assert len(chosen) == len(CHOSEN)
    found = run_all(chosen, tmp_path, jobs=2, deadline=time.monotonic() + 240)
    assert len(found) == len(chosen)
    failed = [report.problems(one) for one in found if one.problems]
    assert not failed, "\n".join(failed)
