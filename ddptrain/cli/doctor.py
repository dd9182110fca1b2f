"""`ddptrain doctor`: checks this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddptrain.cli.printing import print_json, write
from ddptrain.cli.runs.choice import DEFAULT_RUNS_DIR, Json, RunsDir

if TYPE_CHECKING:
    from ddptrain.driver.doctor.judge import Check


def doctor(runs_dir: RunsDir = None, json: Json = False) -> int:
    """Check this machine: torch, GPUs, gloo and NCCL, ports, disk, servers that are configured, and the clock.

    The exit code is 4 if something would make a run fail. `ddptrain cluster check` checks all hosts of a cluster.
    """
    import dataclasses
    import os

    from ddptrain.driver.doctor.judge import Result
    from ddptrain.driver.doctor.machine import check_machine
    from ddptrain.errors import ExitCode

    checks = check_machine(runs_dir or DEFAULT_RUNS_DIR, os.environ)
    bad = any(check.result == Result.BAD for check in checks)
    if json:
        print_json({"ok": not bad, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        write(_lines(checks))
    return ExitCode.CLUSTER if bad else ExitCode.SUCCEEDED


def _lines(checks: list[Check]) -> list[str]:
    from ddptrain.driver.doctor.judge import Result
    from ddptrain.text_tables import clean_line

    width = max(len(check.subject) for check in checks)
    lines = []
    for check in checks:
        hint = f" ({check.hint})" if check.hint else ""
        lines.append(f"{check.result:8} {clean_line(check.subject):{width}}  {clean_line(check.text + hint)}")
    counts = [(sum(check.result == kind for check in checks), kind) for kind in (Result.BAD, Result.WARNING)]
    found = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    return [*lines, "", f"this machine: {found or 'ok'}"]
