"""A dozen of the chaos suite's cases, which `make chaos` has hundreds of: a fault at each kind of moment, and more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.__main__ import run_all
from tests.chaos.table import cases

SEED = 20
ON_ONE_CLUSTER = (
    "segv rendezvous 0 warm",
    "raise first 1 warm",
    "kill mid 1 restart warm",
    "kill write 0 warm",
    "os_exit0 end 1 warm",
    "driver_kill home warm",
)
# Other tests of the default suite show them one by one: test_failures, test_hangs, test_preemption, test_restart.
THE_REST = (
    "worker mid restart embedded",
    "server write own",
    "exit3 mid both warm",
    "stop mid 1 warm",
    "term mid 0 warm",
    "driver_term write warm",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "chosen", [ON_ONE_CLUSTER, pytest.param(THE_REST, marks=pytest.mark.long)], ids=["one", "rest"]
)
def test_faults_are_told_leave_nothing_and_lose_nothing(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    found = [one for words in chosen for one in cases(SEED, 1, words)]
    assert len(found) == len(chosen)
    looked_at = run_all(found, tmp_path, jobs=2, deadline=time.monotonic() + 240)
    assert len(looked_at) == len(chosen)
    failed = [report.problems(one) for one in looked_at if one.problems]
    assert not failed, "\n".join(failed)

    # leak_guard finds what is left of them.
