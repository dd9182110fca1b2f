"""Records which tests execute which lines.

The record is kept in .mutants/. Test files are run again where they, their helpers, or the sources that they execute
have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coverage

from tests.mutants.generate import files
from tests.mutants.plugin import CONTEXT, OUTCOMES

TEST_FOLDERS = ("tests/unit", "tests/end_to_end")  # those of `make test`
_CONFIG = """
[run]
source = {tree}/ddptrain
data_file = {data}
parallel = true
context = ${{{context}}}
patch =
    _exit
    fork
core = ctrace
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-ctracer
"""
_FILES_AT_ONCE = 12
_RECORDING = threading.Lock()


@dataclass(slots=True)
class FileRecord:
    """What the tests of one test file execute.

    tests: test -> (has passed, seconds). lines: source -> context -> lines; a context is a test, or the test file.
    digests: of the test file, of the helpers of all tests, and of the sources that were executed.
    """

    digests: dict[str, str] = field(default_factory=dict)
    tests: dict[str, tuple[bool, float]] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def is_current(self, tree: Path) -> bool:
        """Whether the files that it depends on are as they were."""
        return all(digest(tree / path) == known for path, known in self.digests.items())

    @property
    def passed(self) -> list[str]:
        """The tests that have passed."""
        return [test for test, (passed, _) in self.tests.items() if passed]

    def executing(self, path: str, lines: Iterable[int]) -> list[str]:
        """The tests that execute one of some lines of a source, and have passed."""
        wanted = set(lines)
        contexts = {context for context, found in self.lines.get(path, {}).items() if wanted.intersection(found)}
        whole = any("::" not in context for context in contexts)
        return [test for test in self.passed if whole or test in contexts]

    def runs_at_import(self, path: str, lines: Iterable[int]) -> bool:
        """Whether one of some lines of a source was executed outside tests, while the test file was collected."""
        wanted = set(lines)
        return any("::" not in one and wanted.intersection(found) for one, found in self.lines.get(path, {}).items())


Record = dict[str, FileRecord]


def digest(path: Path) -> str:
    """Of a file's content; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def up_to_date(tree: Path, folder: Path, jobs: int) -> Record:
    """The record of the test files of a tree; kept in `folder`, and renewed as needed."""
    folder.mkdir(exist_ok=True)
    record = {path: _read(folder, path) for path in files(tree, TEST_FOLDERS) if _is_test_file(path)}
    stale = [path for path, known in record.items() if known is None or not known.is_current(tree)]
    groups = [stale[start : start + _FILES_AT_ONCE] for start in range(0, len(stale), _FILES_AT_ONCE)]
    if stale:
        print(f"recording which lines {len(stale)} test files execute, {jobs} processes at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda group: _recorded(tree, group), groups):
            for path, new in found.items():
                record[path] = new
                _file(folder, path).write_text(json.dumps(asdict(new)), encoding="utf-8")
            print(f"  recorded {', '.join(found)}", flush=True)
    return {path: known for path, known in record.items() if known is not None}


def record_of(tree: Path, folder: Path, path: str) -> FileRecord:
    """Which tests of one file pass, and how long they take; without the lines that they execute."""
    with _RECORDING:
        known = _read(folder, path)
        if known is None or not known.is_current(tree):
            known = _recorded(tree, [path], lines=False)[path]
            folder.mkdir(exist_ok=True)
            _file(folder, path).write_text(json.dumps(asdict(known)), encoding="utf-8")
        return known


def _is_test_file(path: str) -> bool:
    return Path(path).name.startswith("test_")


def _recorded(tree: Path, test_paths: Sequence[str], *, lines: bool = True) -> Record:
    """Runs some test files, under coverage if the lines are wanted."""
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-mutants-record-"))
    try:
        config, data = folder / "coveragerc", folder / "data"
        config.write_text(_CONFIG.format(tree=tree, data=data, context=CONTEXT), encoding="utf-8")
        outcomes = folder / "outcomes.json"
        environment = {**test_environment(tree), OUTCOMES: str(outcomes)}
        if lines:
            environment["COVERAGE_PROCESS_START"] = str(config)
        command = [*pytest_command("-p", "tests.mutants.plugin"), *test_paths]
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if not outcomes.exists():
            raise RuntimeError(f"recording {test_paths} failed:\n{done.stdout[-4000:]}")
        tests = json.loads(outcomes.read_text(encoding="utf-8"))
        return _from_data(tree, folder, test_paths, tests)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _from_data(tree: Path, folder: Path, test_paths: Sequence[str], tests: dict[str, tuple[bool, float]]) -> Record:
    record = {path: FileRecord() for path in test_paths}
    for test, (passed, seconds) in tests.items():
        record[_test_file(test)].tests[test] = (passed, seconds)
    for source, contexts in _contexts(tree, folder).items():
        for context, lines in contexts.items():
            if (known := record.get(_test_file(context))) is not None:
                known.lines.setdefault(source, {})[context] = sorted(lines)
    for path, known in record.items():
        depends = {path, *_helpers(tree), *known.lines}
        known.digests = {one: digest(tree / one) for one in sorted(depends)}
    return record


def _contexts(tree: Path, folder: Path) -> dict[str, dict[str, set[int]]]:
    """Source -> context -> lines that were executed in it, of all processes."""
    found: dict[str, dict[str, set[int]]] = {}
    for path in folder.glob("data.*"):
        data = coverage.CoverageData(basename=str(path))
        try:
            data.read()
        except coverage.CoverageException:  # of a process that was killed while it wrote
            continue
        for file in data.measured_files():
            source = os.path.relpath(file, tree)
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    found.setdefault(source, {}).setdefault(context, set()).add(line)
    return found


def _helpers(tree: Path) -> list[str]:
    """Files of the tests that hold no tests: fixtures, programs, stubs."""
    roots = [tree / "tests/conftest.py", *((tree / folder) for folder in TEST_FOLDERS)]
    found = [path for root in roots for path in [root, *root.rglob("*.py")] if path.is_file()]
    return [str(path.relative_to(tree)) for path in found if not _is_test_file(path.name)]


def _test_file(context: str) -> str:
    return context.partition("::")[0]


def _file(folder: Path, test_path: str) -> Path:
    return folder / (re.sub(r"\W+", "-", test_path) + ".json")


def _read(folder: Path, test_path: str) -> FileRecord | None:
    try:
        return FileRecord(**json.loads(_file(folder, test_path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def pytest_command(*options: str) -> list[str]:
    """pytest as mutants run it: one process, no cache."""
    return [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", *options]


def test_environment(tree: Path) -> dict[str, str]:
    """The environment of tests of a copied tree: its package comes before the installed one."""
    return {**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis")}
