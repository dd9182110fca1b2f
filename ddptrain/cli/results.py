"""`ddptrain results`: lists runs; shows their status, logs, curves; writes reports; syncs W&B data; prunes runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.options import VerboseOption
from ddptrain.cli.printing import print_json, say, write
from ddptrain.cli.report import report
from ddptrain.cli.unattended.prune import prune

if TYPE_CHECKING:
    from ddptrain.results.lookup import RunView
    from ddptrain.results.remote.runs import RunsDir as Runs
    from ddptrain.results.show.chart import Style

app = typer.Typer(
    name="results", help="List runs; show one, its logs, its curves; delete old ones.", no_args_is_help=False
)

_DEFAULT_RUNS_DIR = "runs"

RunsDir = Annotated[
    str | None,
    typer.Option(
        "--runs-dir",
        metavar="DIR|URL",
        # Not show_default: the default of this parameter is None.
        help=f"Folder that holds the runs, or s3://bucket/folder.  [default: {_DEFAULT_RUNS_DIR}]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the start of one, latest, a directory, or a URL.")]


@app.callback(invoke_without_command=True)
def results(ctx: typer.Context, runs_dir: RunsDir = None, json: Json = False) -> None:
    """List runs; show one, its logs, its curves."""
    ctx.obj = runs_dir
    if ctx.invoked_subcommand is None:
        _list(runs_dir or _DEFAULT_RUNS_DIR, as_json=json)


@app.command("list")
def list_(ctx: typer.Context, runs_dir: RunsDir = None, json: Json = False) -> None:
    """List the runs, newest first."""
    _list(_folder(ctx, runs_dir), as_json=json)


@app.command(short_help="Show everything about a run.")
def show(ctx: typer.Context, run: Run, runs_dir: RunsDir = None, json: Json = False) -> None:
    """Show everything about a run: status, failure, ranks, metrics, checkpoints and files."""
    from ddptrain.results.show.render import print_sections, sections
    from ddptrain.text_tables import plain_sections

    view = _view(ctx, runs_dir, run)
    if json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in view.layout.artifacts().items()]
        logs = {str(rank): view.layout.told(path) for rank, path in view.layout.logs().items()}
        print_json({**view.as_dict(), "artifacts": files, "logs": logs})
    elif sys.stdout.isatty():
        from rich.console import Console

        print_sections(sections(view), Console())
    else:
        write([plain_sections(sections(view))])


@app.command()
def logs(
    ctx: typer.Context,
    run: Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines of each rank.")] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print the logs of the ranks."""
    from ddptrain.results.run_store import NeededFiles
    from ddptrain.results.show.tail import follow_logs, show_logs

    runs, name = _place(ctx, runs_dir, run)
    view = runs.find(name, NeededFiles.LOGS, rank)
    try:
        if follow:
            running = runs.follow(view, rank)
            write(follow_logs(view, rank, lines, is_running=running, wait=_wait_for_reader()))
        else:
            write(show_logs(view, rank, lines))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def plot(
    ctx: typer.Context,
    run: Run,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="A metric to draw, as val/loss; may be given again. Default: the losses."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The picture: .png, .svg or .pdf. Default: plot.png in the run's directory; a store's run: here.",
        ),
    ] = None,
    no_terminal: Annotated[bool, typer.Option("--no-terminal", help="Only write the picture.")] = False,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Draw the loss curves of a run, as a picture and in the terminal."""
    from ddptrain.results.run_files import is_own_folder
    from ddptrain.results.run_store import NeededFiles
    from ddptrain.results.show.curves import plot_data, plot_of
    from ddptrain.results.show.plot import save_picture, terminal_charts

    runs, name = _place(ctx, runs_dir, run)
    view = runs.find(name, NeededFiles.METRICS)
    drawing = plot_of(view, metric or ())
    # The local copy of a run in a store is not a place for new files, nor is another user's directory.
    in_run = view.layout.is_original and is_own_folder(view.layout.root)
    picture = out or (view.layout.plot_png if in_run else Path(f"{view.run_id}.png"))
    save_picture(drawing, picture, view.record.best)
    if json:
        print_json({"run_id": view.run_id, "file": str(picture), "x": drawing.x_name, "series": plot_data(drawing)})
        return
    write([] if no_terminal else [terminal_charts(drawing, _chart_style()), ""], colours=True)
    write([f"picture: {picture}"])


@app.command(short_help="Send what was recorded offline to Weights & Biases.")
def sync(
    ctx: typer.Context,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's id, the start of one, latest, a directory, or a URL.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs that have something to send.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that all of it may take.")] = 600.0,
    runs_dir: RunsDir = None,
    json: Json = False,
    verbose: VerboseOption = False,
) -> None:
    """Send offline data to Weights & Biases; can be repeated, for example by cron.

    It skips runs that are running, and data that the server already has. The exit code is 4 if something could not be
    sent; the next call tries again.
    """
    from dataclasses import asdict

    from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_runs
    from ddptrain.errors import ExitCode, UsageError
    from ddptrain.results.remote.runs import open_runs_dir

    if (run is None) != every:
        raise UsageError("say which run, as latest, or --all, and not both")
    views = open_runs_dir(_folder(ctx, runs_dir)).list() if run is None else [_view(ctx, runs_dir, run)]
    if every:
        views = [view for view in reversed(views) if view.record.tracking.get("wandb")]

    came: list[SyncResult] = []

    def tell(sent: SyncResult) -> None:
        came.append(sent)
        if not json and (not every or sent.sent or sent.problem or sent.passed_over):
            write([sent.summary])

    all_well = sync_runs(views, timeout, tell)
    if json:
        print_json([asdict(sent) for sent in came] if every else asdict(came[0]))
    if not all_well:
        raise typer.Exit(ExitCode.CLUSTER)


app.command("prune", short_help="Delete old runs.")(prune)
app.command("report", short_help="Write an HTML page about runs, a sweep or a model.")(report)


def _list(runs_dir: str, *, as_json: bool) -> None:
    from ddptrain.results.remote.runs import open_runs_dir
    from ddptrain.results.show.render import HEADER, print_table, rows
    from ddptrain.text_tables import plain_table

    views = open_runs_dir(runs_dir).list()
    if as_json:
        print_json([view.as_dict() for view in views])
    elif not views:
        say(f"no runs in {runs_dir}")
    elif sys.stdout.isatty():
        from rich.console import Console

        print_table(views, Console())
    else:
        write([plain_table([HEADER, *rows(views)])])


def _folder(ctx: typer.Context, runs_dir: str | None) -> str:
    given_before = ctx.obj if isinstance(ctx.obj, str) else None
    return runs_dir or given_before or _DEFAULT_RUNS_DIR


def _place(ctx: typer.Context, runs_dir: str | None, run: str) -> tuple[Runs, str]:
    """The runs folder to search, and the name of the run."""
    from ddptrain.results.remote.runs import open_runs_dir, split_run

    place, name = split_run(run, _folder(ctx, runs_dir))
    return open_runs_dir(place), name


def _view(ctx: typer.Context, runs_dir: str | None, run: str) -> RunView:
    runs, name = _place(ctx, runs_dir, run)
    return runs.find(name)


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


def _chart_style() -> Style:
    import shutil

    from ddptrain.results.show.chart import Style

    is_terminal = sys.stdout.isatty()
    can_show = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    size = shutil.get_terminal_size()
    return Style(
        width=size.columns if is_terminal else 80,
        height=min(20, max(8, size.lines - 10)) if is_terminal else 16,
        unicode=is_terminal and can_show,
        colour=is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )
