"""`ddptrain results prune`: deletes old runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.options import PLACES, JsonOption, parsed
from ddptrain.cli.printing import print_result, say
from ddptrain.config.wording import counted
from ddptrain.errors import ExitCode
from ddptrain.text_tables import clean_line, duration, plain_table

if TYPE_CHECKING:
    from ddptrain.results.prune import PruneReport


_HEADER = ("RUN", "AGE", "SIZE", "REASON")
_DAY_S = 86_400.0


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    keep: Annotated[int, typer.Option(min=0, help="Runs to keep of each name: the newest that succeeded.")] = 20,
    failed_keep: Annotated[
        int, typer.Option(min=0, help="Runs to keep of each name: the newest failed, preempted and cancelled ones.")
    ] = 5,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help='Runs that ended later stay as well, as "30d" or "12h".')
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help='If the remaining runs are larger than this, as "200GB", the oldest are deleted too, whatever the '
            "other options keep.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Delete only runs of this name.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete old runs.

    These always stay: runs that are running, or may be; the run that --resume auto would continue; runs of model
    versions that have an alias (champion, previous, ...); runs of other users. Can be repeated, for
    example by cron: it also finishes what a killed prune has left. The exit code is 4 if a run could not be deleted.
    """
    from ddptrain.config.sections.retraining import duration_s
    from ddptrain.model_registry.model_reader import ModelReader
    from ddptrain.results.prune import PrunePolicy, size_bytes
    from ddptrain.results.prune import prune as prune_runs
    from ddptrain.results.runs import open_runs_dir
    from ddptrain.retrain.clean_up import protected_runs

    policy = PrunePolicy(
        keep=keep,
        failed_keep=failed_keep,
        older_than_s=None if older_than is None else parsed("--older-than", older_than, duration_s),
        max_size_bytes=None if max_size is None else parsed("--max-size", max_size, size_bytes),
        name=name,
    )
    place = PLACES.runs
    runs = open_runs_dir(place)
    registry = ModelReader.open(PLACES.models)
    protected = protected_runs(registry)
    report = prune_runs(runs, policy, protected, dry_run=dry_run)
    print_result(report.as_dict(), _lines(report, policy.max_size_bytes), as_json=as_json)
    if report.removed and not protected:
        say(
            f"ddptrain: no run is kept because of a model: {registry.where} has no models "
            "(--models-dir names another place)"
        )
    if not report.decisions:
        say(f"ddptrain: no runs in {place}" + (f" with the name {name}" if name else ""))
    for problem in report.problems:
        say(f"ddptrain: error: {problem}")
    if report.problems:
        raise typer.Exit(ExitCode.CLUSTER)


def _lines(report: PruneReport, max_size_bytes: int | None) -> Iterator[str]:
    from ddptrain.results.show.render import size

    rows = [(each.run.folder, _age(each.run.age_s), size(each.run.size_bytes), each.reason) for each in report.removed]
    rows += [(name, "-", size(left), "left by an interrupted prune") for name, left in report.finished_bytes.items()]
    if rows:
        yield plain_table([_HEADER, *(tuple(clean_line(cell) for cell in row) for row in rows)])
    yield report.summary
    if report.kept:
        reasons = Counter(each.reason for each in report.kept)
        why = "; ".join(f"{reason} ({number})" if number > 1 else reason for reason, number in reasons.most_common())
        yield clean_line(f"{counted(len(report.kept), 'run')} kept, {size(report.kept_bytes)}: {why}")
    if max_size_bytes is not None and report.kept_bytes > max_size_bytes:
        yield f"this is more than --max-size, {size(max_size_bytes)}: the rest is protected"


def _age(seconds: float) -> str:

    return f"{seconds / _DAY_S:.0f} days" if seconds >= 2 * _DAY_S else duration(seconds)
