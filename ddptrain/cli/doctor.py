"""`ddptrain doctor`: checks this machine."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from ddptrain.cli.options import JsonOption
from ddptrain.cli.printing import print_result
from ddptrain.cli.runs.choice import DEFAULT_RUNS_DIR, RunsDir
from ddptrain.errors import ExitCode
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from ddptrain.driver.doctor.judge import Check


def doctor(runs_dir: RunsDir = None, json: JsonOption = False) -> int:
    """Check this machine: torch, GPUs, gloo and NCCL, ports, disk, servers that are configured, and the clock.

    The exit code is 4 if something would make a run fail. `ddptrain cluster check` checks all hosts of a cluster.
    """
    from ddptrain.driver.doctor.judge import Result
    from ddptrain.driver.doctor.machine import check_machine

    checks = check_machine(runs_dir or DEFAULT_RUNS_DIR, os.environ)
    bad = any(check.result == Result.BAD for check in checks)
    data = {"ok": not bad, "checks": [dataclasses.asdict(check) for check in checks]}
    print_result(data, _check_lines(checks), as_json=json)
    return ExitCode.CLUSTER if bad else ExitCode.SUCCEEDED


def _check_lines(checks: list[Check]) -> list[str]:
    from ddptrain.driver.doctor.judge import Result

    width = max(len(check.subject) for check in checks)
    lines = []
    for check in checks:
        hint = f" ({check.hint})" if check.hint else ""
        lines.append(f"{check.result:8} {clean_line(check.subject):{width}}  {clean_line(check.text + hint)}")
    counts = [(sum(check.result == kind for check in checks), kind) for kind in (Result.BAD, Result.WARNING)]
    found = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    return [*lines, "", f"this machine: {found or 'ok'}"]
