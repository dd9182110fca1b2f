"""A dozen of the chaos suite's cases, which `make chaos` has hundreds of: a fault at each kind of moment, and more."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.__main__ import run_all
from tests.chaos.arena import REPOSITORY
from tests.chaos.table import cases
from tests.conftest import Cli
from tests.unit.worker.stubs import until

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


def test_suite_that_is_told_to_end_leaves_no_process(run_cli: Cli, tmp_path: Path) -> None:
    """It is told while a cluster and a command of a case are up."""
    program = (sys.executable, "-m", "tests.chaos", "--seed", "1", "--only", "stop mid 1 warm", "--cases", "1")
    running = run_cli.start(cwd=REPOSITORY, program=program, env={"TMPDIR": str(tmp_path)})
    first = "*/job-*/undisturbed/runs"  # either of both threads may have the case
    until(lambda: any(tmp_path.glob(first)) or running.popen.poll() is not None, "the first run", timeout_s=200)
    assert running.popen.poll() is None, running.stdout + running.stderr
    running.popen.terminate()
    assert running.finish().rc == 143
    assert "interrupted by SIGTERM: all processes of the cases have ended" in running.stdout
    # leak_guard finds what is left of them.
