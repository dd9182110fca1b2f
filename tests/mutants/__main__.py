"""`python -m tests.mutants`: makes small wrong changes to the code and says which ones no test catches.

Example: python -m tests.mutants --seed 3 --count 60 --jobs 2
The working tree is not touched. The first run takes as long as `make test` under coverage; later runs record again
only the test files whose sources changed. Two suites are scored apart: the unit tests that execute the changed lines,
and the contract tests of the mutant's subject (CONTRACT). Mutants that no unit test catches run first in the second.
`--outcomes FILE` keeps what is known, and continues from it; `--same FILE` takes the mutants of an earlier run, also
where their code has moved.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import queue
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.mutants.generate import Mutant, changes_of, choose, files
from tests.mutants.record import Record, record_of, up_to_date
from tests.mutants.run import Tree, outcome, select_tests

ROOT = Path(__file__).parents[2]
REQUIRED = 0.85
# Path -> the test modules that show what this part does from outside; the longest path counts.
CONTRACT = {
    "ddptrain": ["test_messages", "test_doctor"],
    "ddptrain/cli": ["test_command_line", "test_suggestions", "test_output"],
    "ddptrain/clusters": ["test_clusters", "test_cluster", "test_sharing"],
    "ddptrain/compat": ["test_torchrun_command_line", "test_torchrun_matrix"],
    "ddptrain/config": ["test_dry_run", "test_workload_params", "test_messages"],
    "ddptrain/driver": ["test_run_end", "test_restart", "test_hangs"],
    "ddptrain/driver/display": ["test_output", "test_watch"],
    "ddptrain/model_registry": ["test_models", "test_retrain"],
    "ddptrain/notify": ["test_notify"],
    "ddptrain/protocol": ["test_train", "test_output", "test_metrics"],
    "ddptrain/rank": ["test_prepare", "test_train", "test_run_end"],
    "ddptrain/rank/steps.py": ["test_gradient_exchange"],
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


@dataclass(slots=True)
class Case:
    """A mutant, in words that find it again in another version, and what the tests made of it."""

    path: str
    function: str
    operator: str
    before: str
    after: str
    nth: int  # among equal ones of the function
    line: int
    unit: str = ""  # caught, import, timeout, survived, not executed; "" before it has run
    unit_by: str = ""
    contract: str = ""
    contract_by: str = ""

    @property
    def is_caught(self) -> bool:
        """By one of the suites."""
        return bool({self.unit, self.contract} & {"caught", "import", "timeout"})


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 where enough of the mutants are caught."""
    options = _parser().parse_args(argv)
    cases = _cases(options)
    found = {id(case): mutant for case in cases if (mutant := find(case)) is not None}
    lost = [case for case in cases if id(case) not in found]
    cases = [case for case in cases if id(case) in found]
    print(f"{len(cases)} mutants, {options.jobs} at a time; {len(lost)} whose code does not exist any more", flush=True)
    if options.list:
        print("\n".join(f"{case.path}:{found[id(case)].lines[0]}  {what(case)}" for case in cases))
        return 0

    def save() -> None:
        if options.outcomes:
            options.outcomes.write_text(json.dumps([asdict(case) for case in [*cases, *lost]], indent=1) + "\n")

    def run(case: Case, suite: str, tree: Tree, record: Record, tests: Sequence[str]) -> None:
        result = outcome(tree, record, found[id(case)], tests, is_sure=suite == "unit")
        setattr(case, suite, result.kind)
        setattr(case, f"{suite}_by", result.by)
        save()
        print(f"{suite:9}{result.kind:13}{result.seconds:6.1f} s  {line_of(case)}  {result.by}", flush=True)

    if "unit" in options.suites and any(not case.unit for case in cases):
        with Tree(ROOT) as tree:
            record = up_to_date(tree.path, ROOT / ".mutants", options.jobs)

        def unit(tree: Tree, case: Case) -> None:
            mutant = found[id(case)]
            run(case, "unit", tree, record, select_tests(ROOT, record, mutant, statement_of(mutant)))

        _each([case for case in cases if not case.unit], options.jobs, unit)
    if "contract" in options.suites:
        waiting = [case for case in cases if not case.contract and not (options.survivors and case.is_caught)]
        waiting.sort(key=lambda case: case.is_caught)

        def contract(tree: Tree, case: Case) -> None:
            record = {path: record_of(tree.path, ROOT / ".mutants", path) for path in contract_files(case.path)}
            run(case, "contract", tree, record, [test for known in record.values() for test in known.passed])

        _each(waiting, options.jobs, contract)
    save()
    print(report(cases, found))
    return int(sum(case.is_caught for case in cases) < REQUIRED * len(cases))


def _cases(options: argparse.Namespace) -> list[Case]:
    """Those of the outcomes so far, of another run, or new ones."""
    if options.outcomes and options.outcomes.exists():
        return [Case(**one) for one in json.loads(options.outcomes.read_text())]
    if options.same:
        empty = {"unit": "", "unit_by": "", "contract": "", "contract_by": ""}
        return [Case(**{**one, **empty}) for one in json.loads(options.same.read_text())]
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    return [case_of(mutant) for mutant in choose(ROOT, seed, options.count, options.only)]


@cache
def _identified(path: str) -> dict[tuple[str, str, str, int], Mutant]:
    """(function, before, after, number among equal ones) -> each mutant of a file."""
    source = (ROOT / path).read_bytes()
    found: dict[tuple[str, str, str, int], Mutant] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for mutant in changes_of(ROOT, path):
        words = (mutant.function, mutant.before(source), mutant.after)
        found[(*words, seen[words])] = mutant
        seen[words] += 1
    return found


def case_of(mutant: Mutant) -> Case:
    (function, before, after, nth) = next(key for key, one in _identified(mutant.path).items() if one == mutant)
    return Case(mutant.path, function, mutant.operator, before, after, nth, mutant.lines[0])


def find(case: Case) -> Mutant | None:
    """The mutant in this tree: in its file, or in the only other file of the package that has such a function."""
    key = (case.function, case.before, case.after, case.nth)
    paths = [case.path] if (ROOT / case.path).exists() else []
    if paths and (mutant := _identified(case.path).get(key)):
        return mutant
    name = case.function.rpartition(".")[2].encode()
    others = [path for path in files(ROOT, ["ddptrain"]) if name and name in (ROOT / path).read_bytes()]
    moved = [mutant for path in others if (mutant := _identified(path).get(key))]
    return moved[0] if len(moved) == 1 else None


def contract_files(path: str) -> list[str]:
    """The contract tests of a source, and those with servers where they are about the same."""
    names = next(CONTRACT[str(parent)] for parent in [Path(path), *Path(path).parents] if str(parent) in CONTRACT)
    tried = [f"tests/{folder}/{name}.py" for name in names for folder in ("contract", "integration")]
    return [path for path in tried if (ROOT / path).exists()]


def _each(cases: Sequence[Case], jobs: int, work: Callable[[Tree, Case], None]) -> None:
    """Do something with each case, `jobs` at a time, each job in a tree of its own."""
    waiting: queue.SimpleQueue[Case | None] = queue.SimpleQueue()
    for case in [*cases, *[None] * jobs]:
        waiting.put(case)

    def run() -> None:
        with Tree(ROOT) as tree:
            while (case := waiting.get()) is not None:
                work(tree, case)

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def statement_of(mutant: Mutant) -> tuple[int, int]:
    """First and last line of the smallest statement around a mutant; of a compound statement the lines of its head."""
    tree = ast.parse((ROOT / mutant.path).read_bytes())
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= mutant.lines[0] and mutant.lines[1] <= (node.end_lineno or 0)
    ]
    smallest = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(smallest, "body", None)
    end = body[0].lineno - 1 if body else smallest.end_lineno or smallest.lineno
    return smallest.lineno, max(smallest.lineno, end)


def what(case: Case) -> str:
    """The change, shortened."""
    before, after = (text if len(text) <= 70 else f"{text[:67]}..." for text in (case.before, case.after))
    return f"{case.operator}: {before} -> {after}"


def line_of(case: Case) -> str:
    """Where, and what."""
    return f"{case.path}:{case.line}  {what(case)}"


def report(cases: Sequence[Case], found: dict[int, Mutant]) -> str:
    """The diffs of those that survived, and what each suite caught of each room."""
    survived = [case for case in cases if not case.is_caught and (case.unit or case.contract)]
    lines = [part for case in survived for part in ("", line_of(case), *diff(found[id(case)]))]
    lines.append(f"{'':24}{'unit':>16}{'contract':>16}{'either':>16}")
    rooms = sorted({"/".join(case.path.split("/")[:2]) for case in cases})
    for room in [*rooms, ""]:
        mine = [case for case in cases if case.path.startswith(room)]
        lines.append(f"{room or 'all':24}" + "".join(_share(mine, name) for name in ("unit", "contract", "either")))
    return "\n".join(lines)


def _share(cases: Sequence[Case], suite: str) -> str:
    kinds = [{case.unit, case.contract} if suite == "either" else {getattr(case, suite)} for case in cases]
    run = [kind for kind in kinds if kind != {""}]
    return f"{sum(bool(kind & {'caught', 'import', 'timeout'}) for kind in run):>6} of {len(run):<6}"


def diff(mutant: Mutant) -> list[str]:
    """The change, with two lines around it."""
    source = (ROOT / mutant.path).read_bytes()
    before, after = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    return [*difflib.unified_diff(before, after, mutant.path, "mutant", lineterm="", n=2)][2:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="choose the same mutants again")
    parser.add_argument("--count", type=int, default=60, help="mutants; each file has a share by its lines")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="file or folder; may be repeated")
    parser.add_argument("--suites", nargs="+", default=["unit", "contract"], choices=["unit", "contract"])
    parser.add_argument(
        "--survivors", action="store_true", help="contract tests only for mutants that no unit test catches"
    )
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="keep the outcomes here; what it has is not run")
    parser.add_argument("--same", type=Path, metavar="FILE", help="the mutants of the outcomes of another run")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    return parser


if __name__ == "__main__":
    sys.exit(main())
