"""`python -m tests.bench`: one table of ddptrain against its peers; see --help."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import report
from tests.bench.experiments import EXPERIMENTS
from tests.bench.measure import Records, Result, beside, measure
from tests.bench.stage import DDPTRAIN, QUICK, Sizes, open_stage


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 0 if every row has values and, with --strict, has reached its goal."""
    parser = _parser()
    options = parser.parse_args(argv)
    known = [row.name for experiment in EXPERIMENTS for row in experiment.rows]
    asked = options.rows.split(",") if options.rows else known
    chosen = [row for name in asked for row in _rows(name, known)]
    if unknown := [name for name in asked if not _rows(name, known)]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    runs = options.runs or (1 if options.quick else 5)

    machine, began = report.describe_machine(), time.monotonic()
    results: list[Result] = []
    records: list[Records] = []
    sizes = QUICK if options.quick else Sizes()
    with open_stage(sizes) as stage, open_stage(sizes, str(options.beside or DDPTRAIN)) as other:
        for experiment in EXPERIMENTS:
            rows = [row for row in experiment.rows if {row.name, row.chosen_with} & {*chosen}]
            if rows:
                compared, rows = beside(experiment, rows, other) if options.beside else (experiment, rows)
                found, measured = measure(compared, rows, runs, stage, _say, options.slow_runs)
                results += found
                records.append(measured)
    took_s = time.monotonic() - began
    print("\n\n".join([report.table(results), report.legend(results)]))
    print("\n" + report.method(machine, runs, took_s, quick=options.quick))
    if options.json:
        options.json.write_text(json.dumps(report.raw(machine, runs, took_s, results, records), indent=1) + "\n")
    missed = [result for result in results if result.reached is False]
    return int(any(result.error for result in results) or (options.strict and bool(missed)))


def _rows(name: str, known: Sequence[str]) -> list[str]:
    """The row of that name, or else all rows whose names begin with it, as first-step-warm-2 with first-step."""
    return [name] if name in known else [row for row in known if row.startswith(f"{name}-")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rows", default="", metavar="NAME,...", help="these rows only, or all whose names begin so")
    parser.add_argument("--runs", type=int, default=0, help="runs of each variant (default 5)")
    parser.add_argument("--slow-runs", type=int, default=1, help="runs of a peer that takes minutes (default 1)")
    parser.add_argument("--quick", action="store_true", help="one run, small sizes: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to a file")
    parser.add_argument(
        "--beside", type=_command, metavar="FILE", help="compare with another version, whose command ddptrain this is"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    return parser


def _command(text: str) -> Path:
    path = Path(text).resolve()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a command, such as ../before/.venv/bin/ddptrain")
    return path


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through all blocks that clean up
    sys.exit(main())
