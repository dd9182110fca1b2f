"""`ddptrain doctor`: checks this machine, or all hosts of a cluster."""

from __future__ import annotations

import dataclasses
import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption, checked, field_options
from ddptrain.cli.printing import print_result, say
from ddptrain.errors import ExitCode
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from ddptrain.driver.doctor import Check


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete.clusters,
            help="Check all hosts of this cluster (a name or an address), and measure them.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Check this machine: torch, GPUs, gloo and NCCL, ports, disk, and the object store of the runs.

    With --cluster: the same of each host of a cluster, whether they differ, and the speed of its free slots. The exit
    code is 4 if something would make a run fail.

    Examples:
        ddptrain doctor
        ddptrain doctor --cluster lab
    """
    from ddptrain.driver.doctor import Result, check_machine

    checks = check_machine(PLACES.runs, os.environ) if cluster is None else _cluster_checks(cluster)
    bad = any(check.result == Result.BAD for check in checks)
    data = {"ok": not bad, "checks": [dataclasses.asdict(check) for check in checks]}
    print_result(data, _check_lines(checks, "this machine" if cluster is None else cluster), as_json=json)
    return ExitCode.CLUSTER if bad else ExitCode.SUCCEEDED


def _cluster_checks(cluster: str) -> list[Check]:
    from ddptrain.config.load import load_cluster

    config = checked(lambda overrides: load_cluster(None, overrides), [], field_options(None, cluster))
    # Import Dask before signals may interrupt.
    from ddptrain.driver import connect  # noqa: F401
    from ddptrain.driver.control.signals import signals_to
    from ddptrain.driver.doctor import check_cluster

    with signals_to(SimpleQueue()) as signals, signals.interrupting():
        return check_cluster(cluster, config, say)


def _check_lines(checks: list[Check], what: str) -> list[str]:
    from ddptrain.driver.doctor import Result

    subject, host = (max(len(getattr(check, name)) for check in checks) for name in ("subject", "host"))
    lines = []
    for check in checks:
        hint = f" ({check.hint})" if check.hint else ""
        where = f"{clean_line(check.host):{host}}  " if host else ""
        lines.append(f"{check.result:8} {where}{clean_line(check.subject):{subject}}  {clean_line(check.text + hint)}")
    counts = [(sum(check.result == kind for check in checks), kind) for kind in (Result.BAD, Result.WARNING)]
    found = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    return [*lines, "", f"{what}: {found or 'ok'}"]
