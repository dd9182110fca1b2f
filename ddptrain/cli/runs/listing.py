"""`ddptrain results list`: lists, selects and sorts runs; lists sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_json, say, write
from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.text_tables import plain_table

if TYPE_CHECKING:
    from ddptrain.results.selection import Selection

_SHOWN = 20
_FIELDS = (
    "run, name, workload, status, started, ended, duration, age, ranks, attempts, exit_code, tags, note, "
    "failure, commit"
)


def list_runs(
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Only runs for which this is true, as \"val/loss < 2.3 and params.layers == 1 and 'good' in tags\".",
        ),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Sort by val/loss, or by -val/loss from large to small.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS", help=f"Show these: {_FIELDS}, params.NAME, a metric's last value, best(METRIC)."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help=f"The highest number of runs to show.  [default: {_SHOWN}; with --json all]",
        ),
    ] = None,
    sweeps: Annotated[bool, typer.Option("--sweeps", help="List the sweeps instead, with their best trials.")] = False,
    json: JsonOption = False,
) -> None:
    """List the runs, newest first, and below them the sweeps; with other options, or --json, only runs."""
    from ddptrain.results.selection import Selection

    if sweeps:
        if where or sort or columns or limit:
            raise UsageError("--sweeps lists all sweeps of the folder: leave the other options out")
        _list_sweeps(as_json=json)
        return
    print_runs(PLACES.runs, Selection.parse(where, sort, columns), limit, as_json=json)


def _list_sweeps(*, as_json: bool) -> None:
    from ddptrain.results.sweep_record import list_sweeps as find_sweeps
    from ddptrain.sweep.output import listed_data, sweep_table

    found = find_sweeps(PLACES.runs)
    if as_json:
        print_json([listed_data(each) for each in found])
    elif found:
        _print_table(sweep_table(found))
    else:
        say(f"no sweeps in {PLACES.runs}")


def show_sweep(runs_dir: str, name: str, *, as_json: bool) -> bool:
    """Print the trials of a sweep; return False if there is no sweep of that name, path or URL."""
    import dataclasses

    from ddptrain.results.sweep_record import find_sweep
    from ddptrain.sweep.output import summary_lines

    if (found := find_sweep(runs_dir, name)) is None:
        return False
    if as_json:
        print_json({**dataclasses.asdict(found.record), "sweep_dir": found.where})
    else:
        write(summary_lines(found.record, found.where))
    return True


def print_runs(runs_dir: str, selection: Selection, limit: int | None = None, *, as_json: bool) -> None:
    """Print the runs of a folder that are selected; if there is no selection, also sweeps.

    Raises UsageError, StoreError.
    """
    from ddptrain.results.runs import NeededFiles, open_runs_dir
    from ddptrain.results.selection import cells, header
    from ddptrain.results.show.render import run_table
    from ddptrain.results.sweep_record import list_sweeps as find_sweeps
    from ddptrain.sweep.output import sweep_table

    need = NeededFiles.METRICS if selection.needs_metrics else NeededFiles.NOTHING
    views = open_runs_dir(runs_dir).list(need)
    found = selection.apply(views)
    runs = found[: limit or (None if as_json else _SHOWN)]
    for message in selection.unknown_fields(views):
        say(f"ddptrain: {message}")
    if as_json:
        extra = selection.fields
        print_json(
            [{**run.view.as_dict(), **({"fields": {str(f): run(f) for f in extra}} if extra else {})} for run in runs]
        )
        return
    is_plain = not (selection.fields or limit)
    sweeps = find_sweeps(runs_dir) if is_plain else []
    if not runs and not sweeps:
        say(f"no runs in {runs_dir}" if not views else f"no run matches, of {counted(len(views), 'run')} in {runs_dir}")
        return
    if (fields := selection.columns) is not None:
        table: list[tuple[str, ...]] = [tuple(header(fields)), *(tuple(cells(run, fields)) for run in runs)]
    else:
        table = run_table(runs, selection.extra_columns)
    if runs:
        _print_table(table)
    if len(found) > len(runs):
        say(f"ddptrain: {len(found) - len(runs)} more runs; --limit {len(found)} shows all of them")
    if sweeps:
        write([""] if runs else [])
        _print_table(sweep_table(sweeps))


def _print_table(table: Sequence[tuple[str, ...]]) -> None:
    from ddptrain.results.show.render import print_table

    if sys.stdout.isatty():
        from rich.console import Console

        print_table(table, Console())
    else:
        write([plain_table(table)])
