"""`ddptrain results`: lists runs; shows one, its logs; marks and deletes runs; sends recorded data to W&B."""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.parser import Command
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.cli.reports import compare, export, report
from ddptrain.config.wording import counted
from ddptrain.errors import ExitCode, RunNotFound, UsageError
from ddptrain.file_ops import entries
from ddptrain.text_tables import clean_line, duration, plain_sections, plain_table

if TYPE_CHECKING:
    from ddptrain.results.prune import PruneReport
    from ddptrain.results.selection import RunFields

app = typer.Typer(help="List runs; show one, its logs, its curves; delete old ones.", no_args_is_help=False)

_MARK = "\0"  # no argument contains it
_SHOWN = 20
_FIELDS = (  # the names of selection.FIELDS, which the help does not import
    "run, name, workload, status, started, ended, duration, age, ranks, attempts, exit_code, tags, note, "
    "failure, jobs, commit"
)
_DAY_S = 86_400.0


def _settled(run: RunFields) -> RunFields:
    """Return a run, one in a queue as its batch system knows it."""
    from ddptrain.results.run_record import RunStatus
    from ddptrain.results.selection import RunFields

    if run.view.status != RunStatus.QUEUED:
        return run
    from ddptrain.driver.submit import settled

    return RunFields(settled(run.view))


@app.callback(invoke_without_command=True)
def results(ctx: typer.Context, json: opt.JsonOption = False) -> None:
    """List runs; show one, its logs, its curves."""
    if ctx.invoked_subcommand is None:
        list_runs(json=json)


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
    json: opt.JsonOption = False,
) -> None:
    """List the runs, newest first, and below them the sweeps; with other options, or --json, only runs.

    Examples:
        ddptrain results list
        ddptrain results list --where "status == failed"
        ddptrain results list --sweeps
    """
    place = opt.PLACES.runs
    if sweeps:
        from ddptrain.results.sweep_record import list_sweeps
        from ddptrain.sweep.output import listed_data, sweep_table

        if where or sort or columns or limit:
            raise UsageError("--sweeps lists all sweeps of the folder: leave the other options out")
        all_sweeps = list_sweeps(place)
        if json:
            print_json([listed_data(each) for each in all_sweeps])
        elif all_sweeps:
            _print_table(sweep_table(all_sweeps))
        else:
            say(f"no sweeps in {place}")
        return
    from ddptrain.results.run import fetch_all, is_sweep
    from ddptrain.results.runs import LocalRuns, open_runs_dir
    from ddptrain.results.selection import Selection, cells, header
    from ddptrain.results.show.render import run_table

    selection = Selection.parse(where, sort, columns)
    folder = open_runs_dir(place)
    views = folder.list()
    if selection.needs_metrics:
        fetch_all(views, "metrics.jsonl")
    found = selection.apply(views)
    runs = [_settled(run) for run in found[: limit or (None if json else _SHOWN)]]
    for message in selection.unknown_fields(views):
        say(message)
    if json:
        extra = selection.fields
        print_json(
            [{**run.view.as_dict(), **({"fields": {str(f): run(f) for f in extra}} if extra else {})} for run in runs]
        )
        return
    sweep_rows: list[tuple[str, ...]] = []
    is_local = isinstance(folder, LocalRuns)
    if not (selection.fields or limit) and (not is_local or any(map(is_sweep, entries(Path(place))))):
        from ddptrain.results.sweep_record import list_sweeps
        from ddptrain.sweep.output import sweep_table

        sweep_rows = sweep_table(found_sweeps) if (found_sweeps := list_sweeps(place)) else []
    if not runs and not sweep_rows:
        say(f"no runs in {place}" if not views else f"no run matches, of {counted(len(views), 'run')} in {place}")
        return
    if (fields := selection.columns) is not None:
        table: list[tuple[str, ...]] = [tuple(header(fields)), *(tuple(cells(run, fields)) for run in runs)]
    else:
        table = run_table(runs, selection.extra_columns)
    if runs:
        _print_table(table)
    if len(found) > len(runs):
        say(f"{len(found) - len(runs)} more runs; --limit {len(found)} shows all of them")
    if sweep_rows:
        write([""] if runs else [])
        _print_table(sweep_rows)


def _print_table(table: Sequence[tuple[str, ...]]) -> None:
    from ddptrain.results.show.render import print_table

    if sys.stdout.isatty():
        from rich.console import Console

        print_table(table, Console())
    else:
        write([plain_table(table)])


def show(run: opt.Run, json: opt.JsonOption = False) -> None:
    """Show everything about a run: status, failure, ranks, metrics, checkpoints and files; of a sweep, its trials.

    Examples:
        ddptrain results show latest
    """
    from ddptrain.results.run_record import SWEEP
    from ddptrain.results.selection import RunFields
    from ddptrain.results.show.render import print_sections, sections
    from ddptrain.results.time_use import time_use_of

    try:
        view = opt.view_of(run)
    except RunNotFound:
        if not _show_sweep(run, as_json=json):
            raise
        return
    view = _settled(RunFields(view)).view
    if view.record.kind == SWEEP and _show_sweep(run, as_json=json):  # one in a store
        return
    if json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in view.artifacts().items()]
        logs = {str(rank): view.shown_path(path) for rank, path in view.logs().items()}
        spent = time_use_of(view)
        time_use_s = None if spent is None else spent.as_dict()
        print_json({**view.as_dict(), "time_use_s": time_use_s, "artifacts": files, "logs": logs})
    elif sys.stdout.isatty():
        from rich.console import Console

        print_sections(sections(view), Console())
    else:
        write([plain_sections(sections(view))])


def _show_sweep(name: str, *, as_json: bool) -> bool:
    """Print the trials of a sweep; return False if there is no sweep of that name, path or URL."""
    from ddptrain.results.sweep_record import find_sweep
    from ddptrain.sweep.output import summary_lines

    if (found := find_sweep(opt.PLACES.runs, name)) is None:
        return False
    if as_json:
        print_json({**asdict(found.record), "sweep_dir": found.where})
    else:
        write(summary_lines(found.record, found.where))
    return True


def logs(
    run: opt.Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines of each rank.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each line as an object, as --output json does.")] = False,
) -> None:
    """Print the logs of the ranks.

    Examples:
        ddptrain results logs latest --follow
        ddptrain results logs latest --rank 1 --lines 20
    """
    from ddptrain.results.show.log_follower import follow_logs, show_logs

    runs, name = opt.place_of(run)
    view = runs.find(name)
    try:
        if follow:
            from ddptrain.driver.submit import settling

            write(follow_logs(view, rank, lines, wait=_wait_for_reader(), settling=settling, as_json=json))
        else:
            write(show_logs(view, rank, lines, as_json=json))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _wait_for_reader() -> Callable[[float], None]:
    """Return a function that waits, and raises BrokenPipeError if the reader of the output has closed it."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is not a file, for example in a test
        return time.sleep
    output = select.poll()
    output.register(descriptor, 0)

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if any(state & (select.POLLERR | select.POLLHUP) for _, state in output.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return wait


class TagCommand(Command):
    """A command whose arguments may begin with a minus: `-old` is a tag to remove, not options."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """See click.Command."""
        kept = [_MARK + arg if arg[:1] == "-" and arg[1:2] not in ("", "-") and arg != "-h" else arg for arg in args]
        return super().parse_args(ctx, kept)


def edit(
    run: opt.Run,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="+TAG|-TAG", help="+good adds a tag, -old removes one.")
    ] = None,
    note: Annotated[
        str | None, typer.Option(help='A note, which replaces the one before; "" deletes it.', show_default=False)
    ] = None,
    json: opt.JsonOption = False,
) -> None:
    """Add tags to a run, remove them, or write a note on it; it prints what the run has then.

    Examples:
        ddptrain results edit latest +good -old --note "larger batches"
    """
    from ddptrain.results.annotations import checked_note, tag_changes

    add, remove = tag_changes(word.removeprefix(_MARK) for word in tags or ())
    text = None if note is None else checked_note(note)
    runs, name = opt.place_of(run)
    if add or remove or text is not None:
        found = runs.edit(
            name,
            lambda before: replace(before.with_tags(add, remove), note=before.note if text is None else text),
        )
    else:
        found = runs.find(name).annotations
    lines = [" ".join(found.tags) or "no tags", *([found.note] if found.note else [])]
    print_result({"tags": found.tags, "note": found.note}, lines, as_json=json)


def sync(
    run: opt.OptionalRun = None,
    every: Annotated[bool, typer.Option("--all", help="All runs that have something to send.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that all of it may take.")] = 600.0,
    json: opt.JsonOption = False,
) -> int:
    """Send offline data to Weights & Biases; can be repeated, for example by cron.

    It skips runs that are running, and data that the server already has. The exit code is 4 if something could not be
    sent; the next call tries again.

    Examples:
        ddptrain results sync latest
        ddptrain results sync --all
    """
    from ddptrain.clusters.signals import interruptible
    from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_runs
    from ddptrain.results.runs import open_runs_dir

    if (run is None) != every:
        raise UsageError("say which run, as latest, or --all, and not both")
    views = open_runs_dir(opt.PLACES.runs).list() if run is None else [opt.view_of(run)]
    if every:
        views = [view for view in reversed(views) if view.record.tracking.get("wandb")]
    came: list[SyncResult] = []

    def tell(sent: SyncResult) -> None:
        came.append(sent)
        if not json and (not every or sent.sent or sent.problem or sent.skipped):
            write([sent.summary])

    with interruptible():  # so that SIGTERM ends wandb's processes as well
        all_well = sync_runs(views, timeout, tell, say)
    if json:
        print_json([asdict(sent) for sent in came] if every else asdict(came[0]))
    return ExitCode.SUCCEEDED if all_well else ExitCode.CLUSTER


def remove(runs: opt.RunNames, json: opt.JsonOption = False) -> None:
    """Delete runs with their checkpoints, logs and files. A run that is running, or may be, is refused.

    Examples:
        ddptrain results rm pets-1 pets-2
    """
    from ddptrain.results.prune import remove_run
    from ddptrain.results.show.render import size

    found = []  # all of them, before the first is deleted: a name may be wrong
    for run in dict.fromkeys(runs):
        folder, name = opt.place_of(run)
        found.append((folder, folder.find(name)))
    removed = [(view.run_id, remove_run(folder, view)) for folder, view in found]
    lines = [f"run {run_id} deleted, {size(n_bytes)} freed" for run_id, n_bytes in removed]
    print_result({"removed": [{"run_id": run_id, "size_bytes": n} for run_id, n in removed]}, lines, as_json=json)


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
    json: opt.JsonOption = False,
) -> int:
    """Delete old runs.

    These always stay: runs that are running, or may be; the run that --resume auto would continue; runs of model
    versions that have an alias (champion, previous, ...); runs of other users. Can be repeated, for
    example by cron: it also finishes what a killed prune has left. The exit code is 4 if a run could not be deleted.

    Examples:
        ddptrain results prune --keep 20 --dry-run
        ddptrain results prune --older-than 30d
    """
    from ddptrain.config.types import duration_s
    from ddptrain.model_registry.registry import ModelRegistry
    from ddptrain.results.prune import PrunePolicy, size_bytes
    from ddptrain.results.prune import prune as prune_runs
    from ddptrain.results.runs import open_runs_dir
    from ddptrain.retrain.clean_up import protected_runs

    policy = PrunePolicy(
        keep=keep,
        failed_keep=failed_keep,
        older_than_s=None if older_than is None else opt.parsed("--older-than", older_than, duration_s),
        max_size_bytes=None if max_size is None else opt.parsed("--max-size", max_size, size_bytes),
        name=name,
    )
    place = opt.PLACES.runs
    runs = open_runs_dir(place)
    registry = ModelRegistry.open(opt.PLACES.models)
    protected = protected_runs(registry)
    done = prune_runs(runs, policy, protected, dry_run=dry_run)
    print_result(done.as_dict(), _prune_lines(done, policy.max_size_bytes), as_json=json)
    if done.removed and not protected:
        say(f"no run is kept because of a model: {registry.where} has no models (--models-dir names another place)")
    if not done.decisions:
        say(f"no runs in {place}" + (f" with the name {name}" if name else ""))
    for problem in done.problems:
        say(f"error: {problem}")
    return ExitCode.CLUSTER if done.problems else ExitCode.SUCCEEDED


def _prune_lines(done: PruneReport, max_size_bytes: int | None) -> Iterator[str]:
    from ddptrain.results.show.render import size

    def age(seconds: float) -> str:
        return f"{seconds / _DAY_S:.0f} days" if seconds >= 2 * _DAY_S else duration(seconds)

    rows = [(each.run.folder, age(each.run.age_s), size(each.run.size_bytes), each.reason) for each in done.removed]
    rows += [(name, "-", size(left), "left by an interrupted prune") for name, left in done.finished_bytes.items()]
    if rows:
        header = ("RUN", "AGE", "SIZE", "REASON")
        yield plain_table([header, *(tuple(clean_line(cell) for cell in row) for row in rows)])
    yield done.summary
    if done.kept:
        reasons = Counter(each.reason for each in done.kept)
        why = "; ".join(f"{reason} ({number})" if number > 1 else reason for reason, number in reasons.most_common())
        yield clean_line(f"{counted(len(done.kept), 'run')} kept, {size(done.kept_bytes)}: {why}")
    if max_size_bytes is not None and done.kept_bytes > max_size_bytes:
        yield f"this is more than --max-size, {size(max_size_bytes)}: the rest is protected"


# In the order of `--help`.
app.command("list", short_help="List the runs, newest first, and the sweeps.")(list_runs)
app.command("show", short_help="Show everything about a run.")(show)
app.command("logs", short_help="Print the logs of the ranks.")(logs)
app.command("report", short_help="Write an HTML page about runs, a sweep or a model.")(report)
app.command("compare", short_help="Compare runs: settings, metrics, curves.")(compare)
app.command("edit", cls=TagCommand, short_help="Add tags to a run, or write a note on it.")(edit)
app.command("export", short_help="Write metrics, or a checkpoint, for other tools.")(export)
app.command("sync", short_help="Send what was recorded offline to Weights & Biases.")(sync)
app.command("rm", short_help="Delete runs.")(remove)
app.command("prune", short_help="Delete old runs.")(prune)
