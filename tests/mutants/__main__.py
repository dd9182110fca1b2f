"""`python -m tests.mutants`: makes small wrong changes to the code and shows which ones no test catches.

Example: python -m tests.mutants --seed 3 --count 60 --jobs 2

Each mutant lives in a copy of the working tree. The unit tests that import its module run, then those of its room, and
the contract tests of its subject (SUBJECTS); with --survivors only if the unit tests pass. Returns 0 where REQUIRED of
the mutants are caught.
"""

from __future__ import annotations

import argparse
import difflib
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.mutants.generate import Mutant, choose

ROOT = Path(__file__).parents[2]
REQUIRED = 0.85
# Path -> the contract or integration tests that show what this part does from outside; the longest path counts.
SUBJECTS = {
    "ddptrain": ["test_messages", "test_doctor"],
    "ddptrain/cli": ["test_command_line", "test_suggestions", "test_output"],
    "ddptrain/clusters": ["test_clusters", "test_cluster", "test_queue"],
    "ddptrain/compat": ["test_torchrun_command_line", "test_torchrun_matrix"],
    "ddptrain/config": ["test_dry_run", "test_workload_params", "test_messages"],
    "ddptrain/driver": ["test_run_end", "test_restart", "test_hangs"],
    "ddptrain/driver/display": ["test_output", "test_watch"],
    "ddptrain/model_registry": ["test_models", "test_retrain"],
    "ddptrain/notify": ["test_notify"],
    "ddptrain/protocol": ["test_train", "test_output", "test_metrics"],
    "ddptrain/rank": ["test_prepare", "test_train", "test_run_end"],
    "ddptrain/reports": ["test_report_page"],
    "ddptrain/results": ["test_results", "test_resume_forgotten", "test_runs_in_stores"],
    "ddptrain/retrain": ["test_retrain"],
    "ddptrain/schedule": ["test_schedule"],
    "ddptrain/starter": ["test_conveniences"],
    "ddptrain/storage": ["test_remote_results", "test_images_sources"],
    "ddptrain/sweep": ["test_sweep"],
    "ddptrain/tracking": ["test_trackers", "test_tracking"],
    "ddptrain/worker": ["test_train", "test_output", "test_metrics"],
    "ddptrain/workloads": ["test_images_sources", "test_evaluation", "test_workload_params", "test_loader"],
}
_LIMIT_S = 900.0  # for the tests of one mutant
_MARK = "DDPTRAIN_MUTANTS_TREE"  # in the environment of all processes of tests
_TREE_AGE_S = 1_000_000.0  # sources of a tree are that old, so that each change of one is seen by its date


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 where enough of the mutants are caught."""
    options = _parser().parse_args(argv)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    mutants = choose(ROOT, seed, options.count, options.only)
    print(f"seed {seed}: {len(mutants)} mutants, {options.jobs} at a time", flush=True)
    if options.list:
        print("\n".join(map(_line, mutants)))
        return 0
    caught: dict[tuple[Mutant, str], bool] = {}

    def work(tree: Tree, mutant: Mutant) -> None:
        for suite, paths in suites(mutant.path).items():
            if options.survivors and any(caught.get((mutant, each)) for each in ("unit", "contract")):
                return
            began = time.monotonic()
            by = ""
            for some in [near(mutant.path), paths] if suite == "unit" else [paths]:
                by = by or tree.failing_test(mutant, some, again=suite == "contract")
            caught[mutant, suite] = bool(by)
            print(f"{suite:9}{time.monotonic() - began:6.0f} s  {_line(mutant)}  {by or 'SURVIVED'}", flush=True)

    _each(mutants, options.jobs, work)
    survivors = [mutant for mutant in mutants if not any(caught.get((mutant, suite)) for suite in ("unit", "contract"))]
    for mutant in survivors:
        print(f"\n{_line(mutant)}\n{_diff(mutant)}")
    for suite in ("unit", "contract"):
        run = [is_caught for (_, of), is_caught in caught.items() if of == suite]
        print(f"{suite}: {sum(run)} of {len(run)} caught")
    print(f"either: {len(mutants) - len(survivors)} of {len(mutants)} caught")
    return int(len(mutants) - len(survivors) < REQUIRED * len(mutants))


def suites(path: str) -> dict[str, list[str]]:
    """Return the unit tests of the room of a source, and the contract tests of its subject."""
    room = Path(path).parts[1]
    unit = [f"tests/unit/{room}", f"tests/unit/test_{room.removesuffix('.py')}.py"]
    names = next(SUBJECTS[str(parent)] for parent in [Path(path), *Path(path).parents] if str(parent) in SUBJECTS)
    tried = [f"tests/{folder}/{name}.py" for name in names for folder in ("contract", "integration")]
    found = {"unit": unit, "contract": tried}
    return {suite: [path for path in paths if (ROOT / path).exists()] for suite, paths in found.items()}


def near(path: str) -> list[str]:
    """Return the unit tests that import a source: most mutants are caught there, within seconds."""
    room, _, module = path.removesuffix(".py").replace("/", ".").rpartition(".")
    imports = re.compile(rf"{re.escape(room)}(\.| import [^\n]*\b){module}\b")
    found = [test for test in sorted((ROOT / "tests/unit").rglob("test_*.py")) if imports.search(test.read_text())]
    return [str(test.relative_to(ROOT)) for test in found]


class Tree:
    """A copy of the files of a git work tree, those that are not committed included; used by one thread."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ddptrain-mutants-"))
        self._changes = 0
        self._unstable: set[str] = set()  # tests that fail without a mutant
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, text=True)
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)

    def failing_test(self, mutant: Mutant, paths: Sequence[str], *, again: bool) -> str:
        """Return the first test that fails because of a mutant, "" for none, "timeout" or "no test could run".

        A test that fails without the mutant, too, proves nothing; with `again` one that fails only once does not.
        """
        source = (self.path / mutant.path).read_bytes()
        unproven: set[str] = set()
        while paths:
            self._write(mutant.path, mutant.apply(source))
            try:
                status, failed = self._run(paths, unproven | self._unstable)
                repeats = not again or not failed or self._run([failed], set())[0] != 0
            finally:
                self._write(mutant.path, source)
            if status in (0, 5):  # passed, or no test is left
                return ""
            if not failed:
                return "timeout" if status is None else "no test could run"
            if not repeats:
                unproven.add(failed)
            elif self._run([failed], set())[0] == 0:
                return failed
            else:
                self._unstable.add(failed)
        return ""

    def _write(self, path: str, content: bytes) -> None:
        """Change a file. Its date shows Python that the bytecode of before is of another file."""
        self._changes += 1
        (self.path / path).write_bytes(content)
        date = time.time() - _TREE_AGE_S + 10 * self._changes
        os.utime(self.path / path, (date, date))

    def _run(self, paths: Sequence[str], without: set[str]) -> tuple[int | None, str]:
        """Return the status of pytest, None after the limit, and the first test that fails."""
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "-r", "fE", "--tb", "no"]
        command = [sys.executable, "-m", "pytest", *options, *(f"--deselect={test}" for test in without), *paths]
        own = {"PYTHONPATH": str(self.path), "HYPOTHESIS_STORAGE_DIRECTORY": str(self.path / ".hypothesis")}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env={**os.environ, **own, _MARK: str(self.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for left in psutil.process_iter():  # a mutant, or the limit, has kept some from ending
                with suppress(psutil.Error, OSError):
                    if left.environ().get(_MARK) == str(self.path):
                        left.kill()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        summary = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return status, summary[0].partition(" - ")[0] if summary and "::" in summary[0] else ""


def _each(mutants: Sequence[Mutant], jobs: int, work: Callable[[Tree, Mutant], None]) -> None:
    """Do the work for each mutant, `jobs` at a time, each job in a tree of its own."""
    waiting: queue.SimpleQueue[Mutant | None] = queue.SimpleQueue()
    for mutant in [*mutants, *[None] * jobs]:
        waiting.put(mutant)

    def run() -> None:
        tree = Tree(ROOT)
        try:
            while (mutant := waiting.get()) is not None:
                work(tree, mutant)
        finally:
            shutil.rmtree(tree.path, ignore_errors=True)

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _line(mutant: Mutant) -> str:
    before, after = (
        text if len(text) <= 70 else f"{text[:67]}..."
        for text in (mutant.before((ROOT / mutant.path).read_bytes()), mutant.after)
    )
    return f"{mutant.path}:{mutant.lines[0]}  {mutant.operator}: {before} -> {after}"


def _diff(mutant: Mutant) -> str:
    source = (ROOT / mutant.path).read_bytes()
    before, after = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    return "\n".join([*difflib.unified_diff(before, after, lineterm="", n=2)][2:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="choose the same mutants again")
    parser.add_argument("--count", type=int, default=60, help="mutants; each file has a share by its lines")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="file or folder; may be repeated")
    parser.add_argument("--survivors", action="store_true", help="contract tests only for what unit tests do not catch")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    return parser


if __name__ == "__main__":
    sys.exit(main())
