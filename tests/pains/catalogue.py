"""All problems, in the order of the page."""

from __future__ import annotations

from tests.pains.ending import clock, orphans, sighup, sigterm, stdin
from tests.pains.failing import (
    exit_minus_9,
    exit_zero,
    hang,
    import_error,
    lost_host,
    missing_call,
    nan,
    restart,
    root_cause,
    uneven_data,
)
from tests.pains.problem import Problem
from tests.pains.saving import disk_full, mid_epoch, partial_checkpoint, unpicklable
from tests.pains.sharing import download, log_lines, ports, set_epoch, sweeps, wandb_hangs, wandb_runs

PROBLEMS: tuple[Problem, ...] = tuple(
    module.PROBLEM
    for module in (
        root_cause, hang, exit_minus_9, exit_zero, missing_call, uneven_data, nan, import_error, restart, lost_host,
        sigterm, sighup, orphans, clock, stdin,
        partial_checkpoint, mid_epoch, disk_full, unpicklable,
        ports, log_lines, download, set_epoch, wandb_runs, wandb_hangs, sweeps,
    )
)  # fmt: skip
