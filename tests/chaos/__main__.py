"""`python -m tests.chaos`: faults x moments x victims through the command line, with real processes; see --help."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.chaos import processes, report
from tests.chaos.arena import REPOSITORY, STARTING, Arena
from tests.chaos.runner import Findings, Reference, run_case, undisturbed
from tests.chaos.table import Case, case, cases, kinds

_HOSTILE_INPUTS = "10000"  # in all


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, then the hostile inputs. Returns 0 if everything is as expected."""
    options = _parser().parse_args(argv)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    if options.case is not None:
        chosen = [case(seed, options.case, sharded=options.sharded)]
    else:
        chosen = list(cases(seed, options.cases, options.only, sharded=options.sharded))
    if not chosen:
        print(f"no case has the words {options.only!r}; such are: {case(seed, 0).kind.words}", file=sys.stderr)
        return 2
    os.environ[processes.SESSION] = uuid.uuid4().hex
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    print(f"seed {seed}: {len(chosen)} cases, {options.jobs} at a time", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-chaos-"))
    began = time.monotonic()
    found = run_all(chosen, folder, options.jobs, deadline=began + 60 * options.minutes)
    print(report.table(found, time.monotonic() - began))
    failed = sorted(one.case.number for one in found if one.problems)
    if failed:
        print(f"failed: {', '.join(map(str, failed))}; their folders are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if len(found) < len(chosen):
        print(f"{len(chosen) - len(found)} cases were not begun: the {options.minutes:g} minutes are over")
    return int(bool(failed) or not found or (not options.case and not options.only and not _hostile_inputs()))


def _stop(number: int, _: object) -> NoReturn:
    """End at once, with all processes of the cases."""
    STARTING.acquire()  # for good: the threads of the cases start nothing more
    while left := processes.of_session():
        processes.kill(left)
        time.sleep(0.1)
    print(f"interrupted by {signal.Signals(number).name}: all processes of the cases have ended", flush=True)
    os._exit(128 + number)  # the threads wait for commands


def run_all(chosen: Sequence[Case], folder: Path, jobs: int, deadline: float) -> list[Findings]:
    """The results of all cases, run `jobs` at a time. No case is started after the deadline."""
    found: list[Findings] = []
    waiting, lock = iter(chosen), threading.Lock()
    reference = _Once(any(one.sharded for one in chosen))

    def work(number: int) -> None:
        arena = Arena(folder / f"job-{number}")
        try:
            known = reference.get(arena)
            while time.monotonic() < deadline:
                with lock:
                    one = next(waiting, None)
                if one is None:
                    return
                finding = run_case(arena, one, known)
                with lock:
                    found.append(finding)
                    _tell(finding)
        finally:
            arena.close()

    threads = [threading.Thread(target=work, args=(number,), name=f"chaos-{number}") for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class _Once:
    """The run without a fault. The first thread does it, and the others wait for it."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded
        self._lock = threading.Lock()
        self._known: Reference | None = None

    def get(self, arena: Arena) -> Reference:
        with self._lock:
            if self._known is None:
                self._known = undisturbed(arena, self._sharded)
            return self._known


def _tell(one: Findings) -> None:
    end = f"{one.fault_to_end_s:5.2f} s to its end" if one.fault_to_end_s is not None else " " * 17
    state = "ok    " if not one.problems else "FAILED"
    print(f"{state} {one.case.number:4} {one.took_s:5.1f} s  {end}  {one.case.words}", flush=True)
    if one.problems:
        print(report.problems(one), flush=True)


def _hostile_inputs() -> bool:
    """Whether ten thousand malformed inputs cause no traceback in ddptrain."""
    print(f"{_HOSTILE_INPUTS} hostile inputs", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit/test_hostile_inputs.py", "-p", "no:cacheprovider"]
    environment = {**os.environ, "DDPTRAIN_HOSTILE_INPUTS": _HOSTILE_INPUTS}
    return subprocess.run([*command, "--timeout", "900"], cwd=REPOSITORY, env=environment).returncode == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="decides everything that chance decides; printed where not given")
    parser.add_argument("--cases", type=int, default=len(kinds()), help="how many (default: all kinds, %(default)s)")
    parser.add_argument("--case", type=int, metavar="K", help="only the K-th of this seed")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with these words, as 'kill mid restart'")
    parser.add_argument("--sharded", action="store_true", help="with FSDP2: each rank writes its part of a checkpoint")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin none after that long (default 20)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
