"""`ddptrain results`: lists runs; shows their status, logs, curves; writes reports; syncs W&B data; prunes runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.examples import Command
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.cli.runs.choice import Run, RunNames, place_of, view_of
from ddptrain.cli.runs.compare import compare
from ddptrain.cli.runs.listing import list_runs, print_runs, show_sweep
from ddptrain.cli.runs.report import report
from ddptrain.cli.unattended.prune import prune
from ddptrain.errors import ExitCode, UsageError
from ddptrain.text_tables import plain_sections

app = typer.Typer(
    name="results", help="List runs; show one, its logs, its curves; delete old ones.", no_args_is_help=False
)

_MARK = "\0"  # no argument contains it


class TagCommand(Command):
    """A command whose arguments may begin with a minus: `-old` is a tag to remove, not options."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """See click.Command."""
        kept = [_MARK + arg if arg[:1] == "-" and arg[1:2] not in ("", "-") and arg != "-h" else arg for arg in args]
        return super().parse_args(ctx, kept)


class ExportFormat(StrEnum):
    """The formats of `ddptrain results export`."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    SAFETENSORS = "safetensors"


@app.callback(invoke_without_command=True)
def results(ctx: typer.Context, json: JsonOption = False) -> None:
    """List runs; show one, its logs, its curves."""
    from ddptrain.results.selection import Selection

    if ctx.invoked_subcommand is None:
        print_runs(PLACES.runs, Selection.parse(None, None, None), as_json=json)


def show(run: Run, json: JsonOption = False) -> None:
    """Show everything about a run: status, failure, ranks, metrics, checkpoints and files; of a sweep, its trials."""
    from ddptrain.errors import RunNotFound
    from ddptrain.results.run_record import SWEEP
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.show.render import print_sections, sections
    from ddptrain.results.time_use import time_use_of

    try:
        view = view_of(run, NeededFiles.EVENTS)
    except RunNotFound:
        if not show_sweep(PLACES.runs, run, as_json=json):
            raise
        return
    if view.record.kind == SWEEP and show_sweep(PLACES.runs, run, as_json=json):  # one in a store
        return
    if json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in view.layout.artifacts().items()]
        logs = {str(rank): view.layout.shown_path(path) for rank, path in view.layout.logs().items()}
        spent = time_use_of(view)
        time_use_s = None if spent is None else spent.as_dict()
        print_json({**view.as_dict(), "time_use_s": time_use_s, "artifacts": files, "logs": logs})
    elif sys.stdout.isatty():
        from rich.console import Console

        print_sections(sections(view), Console())
    else:
        write([plain_sections(sections(view))])


def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines of each rank.")] = None,
) -> None:
    """Print the logs of the ranks."""
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.show.log_follower import follow_logs, show_logs

    runs, name = place_of(run)
    view = runs.find(name, NeededFiles.LOGS, rank)
    try:
        if follow:
            running = runs.follow(view, rank)
            write(follow_logs(view, rank, lines, is_running=running, wait=_wait_for_reader()))
        else:
            write(show_logs(view, rank, lines))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def sync(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete.runs,
            help="A run's id, the start of one, latest, a directory, or a URL.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs that have something to send.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that all of it may take.")] = 600.0,
    json: JsonOption = False,
) -> None:
    """Send offline data to Weights & Biases; can be repeated, for example by cron.

    It skips runs that are running, and data that the server already has. The exit code is 4 if something could not be
    sent; the next call tries again.
    """
    from ddptrain.clusters.signals import interruptible
    from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_runs
    from ddptrain.results.runs import open_runs_dir

    if (run is None) != every:
        raise UsageError("say which run, as latest, or --all, and not both")
    views = open_runs_dir(PLACES.runs).list() if run is None else [view_of(run)]
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
    if not all_well:
        raise typer.Exit(ExitCode.CLUSTER)


def edit(
    run: Run,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="+TAG|-TAG", help="+good adds a tag, -old removes one.")
    ] = None,
    note: Annotated[
        str | None, typer.Option(help='A note, which replaces the one before; "" deletes it.', show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add tags to a run, remove them, or write a note on it; it prints what the run has then."""
    from ddptrain.results.annotations import checked_note, tag_changes

    add, remove = tag_changes(word.removeprefix(_MARK) for word in tags or ())
    text = None if note is None else checked_note(note)
    runs, name = place_of(run)
    if add or remove or text is not None:
        found = runs.annotate(
            name,
            lambda before: replace(before.with_tags(add, remove), note=before.note if text is None else text),
        )
    else:
        found = runs.find(name).annotations
    lines = [" ".join(found.tags) or "no tags", *([found.note] if found.note else [])]
    print_result({"tags": found.tags, "note": found.note}, lines, as_json=json)


def export(
    runs: RunNames,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|FILE|URL",
            help="Folder or file to write; a file has only the metrics; a URL is an MLflow server.",
        ),
    ],
    form: Annotated[ExportFormat, typer.Option("--format", help="Format of the files.")] = ExportFormat.CSV,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, help="With safetensors: the checkpoint of this step.  [default: the best, or newest]"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the metrics of runs, or the checkpoint of one, for other tools; files that exist are replaced.

    csv: metrics.csv has a row for each call of ctx.log; runs.csv has a row for each run, with its
    parameters and the last and best value of each metric. tensorboard: a folder for each run. mlflow: runs in a
    folder for MLflow, or on its server. safetensors: the best checkpoint of a run, also of a sharded model, in a new
    folder, which `ddptrain predict` accepts; above 5 GB several files and an index. Its files are verified first.
    """
    if form is ExportFormat.SAFETENSORS:
        if len(runs) > 1:
            raise UsageError("safetensors is the format of one run's checkpoint: name one run")
        _consolidate(runs[0], output, step, as_json=json)
        return
    if step is not None:
        raise UsageError("--step is the step of a checkpoint: it is for --format safetensors")
    from ddptrain.results.export import export_mlflow, export_tables, export_tensorboard
    from ddptrain.results.runs import NeededFiles

    views = [view_of(run, NeededFiles.COMPARISON) for run in dict.fromkeys(runs)]
    if form is ExportFormat.MLFLOW:
        written = [f"run {run_id}" for run_id in export_mlflow(views, output)]
    elif "://" in output:
        raise UsageError(f"cannot write {form} to {output}: give a folder; only MLflow has a server")
    elif form is ExportFormat.TENSORBOARD:
        written = [str(path) for path in export_tensorboard(views, Path(output))]
    else:
        written = [str(path) for path in export_tables(views, Path(output))]
    print_result({"format": str(form), "written": written}, written, as_json=json)


def _consolidate(run: str, output: str, step: int | None, *, as_json: bool) -> None:
    """Write a checkpoint, also of a sharded model, as one safetensors checkpoint; without a GPU."""
    from ddptrain.results.checkpoints import consolidation
    from ddptrain.results.layout import BEST, step_name
    from ddptrain.results.lookup import find_checkpoint
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.show.render import size

    which = BEST if step is None else step_name(step)
    view = view_of(run, NeededFiles.MODEL, which)
    checkpoint = find_checkpoint(view.layout, which)
    target = Path(output).expanduser().absolute()
    done = consolidation.consolidate(checkpoint, target, more=[view.layout.run_json])
    about = {"run_id": view.run_id, "step": done.step, "folder": str(done.folder), "files": list(done.files)}
    text = f"{view.run_id}: step {done.step} written to {done.folder}: {done.tensors:,} tensors, {size(done.n_bytes)}"
    print_result({**about, "tensors": done.tensors, "size_bytes": done.n_bytes}, [text], as_json=as_json)


def remove(runs: RunNames, json: JsonOption = False) -> None:
    """Delete runs with their checkpoints, logs and files. A run that is running, or may be, is refused."""
    from ddptrain.results.prune import remove_run
    from ddptrain.results.show.render import size

    found = []  # all of them, before the first is deleted: a name may be wrong
    for run in dict.fromkeys(runs):
        folder, name = place_of(run)
        found.append((folder, folder.find(name)))
    removed = [(view.run_id, remove_run(folder, view)) for folder, view in found]
    lines = [f"run {run_id} deleted, {size(n_bytes)} freed" for run_id, n_bytes in removed]
    print_result({"removed": [{"run_id": run_id, "size_bytes": n} for run_id, n in removed]}, lines, as_json=json)


def _wait_for_reader() -> Callable[[float], None]:
    """Return a function that waits, and raises BrokenPipeError if the reader of the output has closed it."""
    import errno
    import select
    import time

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
