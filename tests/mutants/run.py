"""Runs mutants in copies of the working tree: for each, the tests that execute the changed lines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil

from tests.mutants.generate import Mutant
from tests.mutants.record import Record, pytest_command, test_environment

_START_S = 60.0  # for Python, pytest and imports of torch on a busy machine
_SLOWER = 5.0  # than in the recording, for hypothesis takes longer where it has found a failure
_MARK = "DDPTRAIN_MUTANTS_TREE"  # in the environment of all processes of tests
_TREE_AGE_S = 1_000_000.0  # sources of a tree are that old, so that each change of one is seen by its date


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant; `by` is the first test that failed."""

    kind: Literal["caught", "import", "timeout", "survived", "not executed"]
    seconds: float
    by: str = ""


class Tree:
    """A copy of the files of a git work tree, those that are not committed included; used by one thread."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ddptrain-mutants-"))
        self._changes = 0
        self.stable: set[str] = set()  # tests that failed with a mutant, and passed without it
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, stdout=subprocess.PIPE, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, path: str, content: bytes) -> None:
        """Change a file. Its date tells Python that the bytecode of before is of another file."""
        self._changes += 1
        (self.path / path).write_bytes(content)
        date = time.time() - _TREE_AGE_S + 10 * self._changes
        os.utime(self.path / path, (date, date))

    def run(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """(exit status, output) of pytest up to the first failure; the status is None after the limit."""
        arguments = self.path / ".mutant-tests"
        arguments.write_text("\n".join(tests), encoding="utf-8")
        command = [*pytest_command("-x", "-r", "fE", "--tb", "no"), f"@{arguments}"]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env={**test_environment(self.path), _MARK: str(self.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._end_processes()
            output.seek(0)
            return status, output.read().decode(errors="replace")

    def _end_processes(self) -> None:
        """Of the tests: a mutant, or a limit, has kept some from ending."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == str(self.path):
                    process.kill()


def select_tests(root: Path, record: Record, mutant: Mutant, statement: tuple[int, int]) -> list[str]:
    """The tests that execute the mutant's lines, or else its statement.

    The module's own test file is the first, and of the others those that take less time.

    Lines that run when the module is imported belong to no test, or to the file that was the first to import it: then
    the tests that execute any line of the module, and those of files that import it.
    """
    whole = range(1, 100_000)
    for lines in (range(mutant.lines[0], mutant.lines[1] + 1), range(statement[0], statement[1] + 1), whole):
        if lines != whole and any(known.runs_at_import(mutant.path, lines) for known in record.values()):
            continue
        by_file = {path: known.executing(mutant.path, lines) for path, known in record.items()}
        if lines == whole:
            by_file |= {path: known.passed for path, known in record.items() if imports(root / path, mutant.path)}
        if any(by_file.values()):
            break
    seconds = {path: seconds_of(record, tests) for path, tests in by_file.items()}
    own = f"test_{Path(mutant.path).name}"
    order = sorted(by_file, key=lambda path: (Path(path).name != own, seconds[path]))
    return [test for path in order for test in by_file[path]]


def imports(test_file: Path, source: str) -> bool:
    """Whether a test file imports a module."""
    package, _, name = source.removesuffix(".py").replace("/", ".").rpartition(".")
    pattern = rf"^ *(from|import) {package}\.{name}\b|^ *from {package} import [(\w\s,]*\b{name}\b"
    return re.search(pattern, test_file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def seconds_of(record: Record, tests: Sequence[str]) -> float:
    """How long tests took when they were recorded."""
    return sum(record[test.partition("::")[0]].tests[test][1] for test in tests)


def outcome(tree: Tree, record: Record, mutant: Mutant, tests: Sequence[str], *, is_sure: bool) -> Outcome:
    """Run a mutant.

    A test that fails without it too, as it is unstable, proves nothing and is left out; so is one that passes a second
    time with the mutant, unless `is_sure`: tests that wait for processes may fail on a busy machine.
    """
    began = time.monotonic()
    source = (tree.path / mutant.path).read_bytes()
    left = list(tests)
    while left:
        tree.write(mutant.path, mutant.apply(source))
        try:
            status, output = tree.run(left, _START_S + _SLOWER * seconds_of(record, left))
            failed = failed_test(output, left)
            repeats = is_sure or not status or not failed or tree.run([failed], _limit_s(record, failed))[0] != 0
        finally:
            tree.write(mutant.path, source)
        if status is None:
            return Outcome("timeout", time.monotonic() - began)
        if status == 0:
            return Outcome("survived", time.monotonic() - began)
        if not failed:
            return Outcome("import", time.monotonic() - began)
        if repeats and (failed in tree.stable or _passes(tree, record, failed)):
            return Outcome("caught", time.monotonic() - began, failed)
        left.remove(failed)
    return Outcome("not executed" if not tests else "survived", time.monotonic() - began)


def _limit_s(record: Record, test: str) -> float:
    return _START_S + _SLOWER * seconds_of(record, [test])


def _passes(tree: Tree, record: Record, test: str) -> bool:
    """Whether a test passes without any mutant."""
    passed = tree.run([test], _START_S + _SLOWER * seconds_of(record, [test]))[0] == 0
    if passed:
        tree.stable.add(test)
    return passed


def failed_test(output: str, tests: Sequence[str]) -> str:
    """Which of `tests` failed, by pytest's summary; "" if no test could be run."""
    for line in output.splitlines():
        status, _, rest = line.partition(" ")
        if status in {"FAILED", "ERROR"}:
            return max((test for test in tests if f"{rest} - ".startswith(f"{test} - ")), key=len, default="")
    return ""
