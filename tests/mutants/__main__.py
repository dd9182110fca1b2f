"""`python -m tests.mutants`: makes small wrong changes to the code and tells which ones no test of `make test` catches.

Example: python -m tests.mutants --seed 3 --count 60 --jobs 2
The working tree is not touched. The first run takes as long as `make test` under coverage; later runs record again
only the test files whose sources changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import queue
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.generate import Mutant, choose
from tests.mutants.record import Record, up_to_date
from tests.mutants.run import Outcome, Tree, outcome, select_tests

ROOT = Path(__file__).parents[2]
REQUIRED = 0.90
# Mutants that change nothing that can be observed: "file: before -> after", and why.
EQUIVALENT: dict[str, str] = {
    "ddptrain/workloads/images/data/split.py: 1.0 -> 2.0": "a shortcut: a share of 1.0 also rounds to all images",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 where at least 90 % of the mutants are caught."""
    options = _parser().parse_args(argv)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    mutants = [one for one in choose(ROOT, seed, options.count, options.only) if name(one) not in EQUIVALENT]
    print(f"seed {seed}: {len(mutants)} mutants, {options.jobs} at a time", flush=True)
    with Tree(ROOT) as tree:
        record = up_to_date(tree.path, ROOT / ".mutants", options.jobs, options.tests)
    if options.list:
        for mutant in mutants:
            tests = select_tests(ROOT, record, mutant, statement_of(mutant))
            print(f"{name(mutant)}  [{mutant.operator}; {len(tests)} tests]")
        return 0
    outcomes = run_all(mutants, record, options.jobs)
    print(report(outcomes))
    return int(sum(one.is_caught for one in outcomes) < REQUIRED * len(outcomes))


def run_all(mutants: Sequence[Mutant], record: Record, jobs: int) -> list[Outcome]:
    """The outcomes of mutants, `jobs` at a time, each job in a tree of its own."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    found: list[Outcome] = []
    for mutant in mutants:
        waiting.put(mutant)

    def work() -> None:
        with Tree(ROOT) as tree:
            while not waiting.empty():
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                found.append(outcome(tree, record, mutant, statement_of(mutant)))
                print(f"{len(found):4} of {len(mutants)}  {line_of(found[-1])}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


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


def name(mutant: Mutant) -> str:
    """What EQUIVALENT calls a mutant; without its line, which changes often."""
    return f"{mutant.path}: {mutant.describe((ROOT / mutant.path).read_bytes())}"


def line_of(one: Outcome) -> str:
    """A line of the table."""
    mutant = one.mutant
    what = mutant.describe((ROOT / mutant.path).read_bytes())
    by = f"  by {one.by}" if one.by else ""
    return f"{one.kind:13}{one.seconds:6.1f} s  {mutant.path}:{mutant.lines[0]}  {mutant.operator}: {what}{by}"


def report(outcomes: Sequence[Outcome]) -> str:
    """The diffs of those that survived, what was caught of each room, and the percentage."""
    survived = [one for one in outcomes if not one.is_caught]
    lines = [part for one in survived for part in ("", line_of(one), *diff(one.mutant))]
    rooms = sorted({"/".join(one.mutant.path.split("/")[:2]) for one in outcomes})
    for room in rooms:
        mine = [one for one in outcomes if one.mutant.path.startswith(room)]
        lines.append(f"{room:24}{sum(one.is_caught for one in mine):4} of {len(mine)}")
    n_caught = len(outcomes) - len(survived)
    lines.append(f"{'caught':24}{n_caught:4} of {len(outcomes)}: {n_caught / max(1, len(outcomes)):.0%}")
    return "\n".join(lines)


def diff(mutant: Mutant) -> list[str]:
    """The change, with two lines around it."""
    source = (ROOT / mutant.path).read_bytes()
    before, after = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    return [*difflib.unified_diff(before, after, mutant.path, "mutant", lineterm="", n=2)][2:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, help="choose the same mutants again")
    parser.add_argument("--count", type=int, default=60, help="mutants, equally many of each room")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="file or folder; may be repeated")
    parser.add_argument(
        "--tests",
        action="append",
        default=[],
        metavar="PATH",
        help="run only tests of this file or folder; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and how many tests execute each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
