"""`ddptrain results compare`, `report` and `export`: what is drawn and written of runs."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption, RunNames, view_of
from ddptrain.cli.printing import print_json, print_result, write
from ddptrain.errors import RunNotFound, UsageError

if TYPE_CHECKING:
    from ddptrain.results.show.curves import Style

_LATEST = "latest"


class Align(StrEnum):
    """The values of --align."""

    STEP = "step"
    EPOCH = "epoch"


class ExportFormat(StrEnum):
    """The formats of `ddptrain results export`."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"
    SAFETENSORS = "safetensors"


def compare(
    runs: RunNames,
    align: Annotated[
        Align | None,
        typer.Option(
            help="What the curves are drawn against. Default: step, if all values have one.", show_default=False
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="A metric to draw, as val/loss; repeatable. Default: the losses."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare runs: parameters, configuration, code, data, versions, metrics and curves. Of one run: draw its curves.

    Differences of values are to the first run. Tables show only what differs. `ddptrain results report RUN RUN` draws
    the same curves in an HTML page.

    Examples:
        ddptrain results compare pets-1 pets-2
        ddptrain results compare latest --metric val/loss
    """
    from ddptrain.results.compare import compare_runs, comparison_text
    from ddptrain.results.show.curves import plot_data, plot_of, terminal_charts

    if len(runs) == 1:
        view = view_of(runs[0])
        plot = plot_of(view, metric or ())
        if json:
            print_json({"run_id": view.run_id, "x": plot.x_name, "series": plot_data(plot)})
        else:
            write([terminal_charts(plot, chart_style())], colours=True)
        return
    views = [view_of(run) for run in runs]
    found = compare_runs(views, None if align is None else align.value, metric or ())
    if json:
        print_json(found.as_dict())
        return
    write([comparison_text(found)])
    if any(panel.curves for panel in found.plot.panels):
        write(["", terminal_charts(found.plot, chart_style())], colours=True)


def chart_style() -> Style:
    """Return the style of charts that the terminal can show."""
    import shutil

    from ddptrain.results.show.curves import Style

    is_terminal = sys.stdout.isatty()
    can_show = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    size = shutil.get_terminal_size()
    return Style(
        width=size.columns if is_terminal else 80,
        height=min(20, max(8, size.lines - 10)) if is_terminal else 16,
        unicode=is_terminal and can_show,
        colour=is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|SWEEP",
            autocompletion=complete.runs,
            help="Runs (an id, the start of one, latest, SWEEP/7, a directory, a URL), or a sweep.  [default: latest]",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write.  [default: RUN.html, for several runs report.html, in the current folder]",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file: curves, timeline, failure, logs, images, tables and configuration.

    The file contains everything that it shows. It can be sent by mail and opened without a network. Several runs are
    compared in the same curves.

    Examples:
        ddptrain results report latest --output report.html
    """
    from ddptrain.file_ops import write_atomic
    from ddptrain.reports.destinations import writable_file
    from ddptrain.reports.page import find_subjects, page_html, runs_page
    from ddptrain.results.errors import results_errors

    if output == "-":
        raise UsageError("--output -: a page is written to a file; name one, as report.html")
    place = PLACES.runs
    views, found = find_subjects([_newest(place) if name == _LATEST else name for name in names or [_LATEST]], place)
    sweep = found.sweep_id if found is not None else None
    name = "report" if len(names or ()) > 1 else sweep or views[0].run_id
    path = writable_file("--output", output or f"{name}.html")
    page = page_html(runs_page(views, found))
    with results_errors(path):
        write_atomic(path, page, durable=False)
    data = {
        "file": str(path),
        "size_bytes": len(page),
        "runs": [view.run_id for view in views],
        "sweep": sweep,
    }
    print_result(data, [f"report: {path} ({len(page) / 1e6:.1f} MB)"], as_json=as_json)


def _newest(runs_dir: str) -> str:
    """Return the newest run or sweep. Raises RunNotFound."""
    from ddptrain.results.runs import open_runs_dir
    from ddptrain.results.sweep_record import list_sweeps

    sweep = next((found.record for found in list_sweeps(runs_dir)), None)
    try:
        run = open_runs_dir(runs_dir).find(_LATEST)
    except RunNotFound:
        if sweep is None:
            raise
        return sweep.sweep_id
    if sweep is not None and sweep.started_at > (run.record.started_at or ""):
        return sweep.sweep_id
    return run.root.name


def export(
    runs: RunNames,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|FILE",
            help="Folder or file to write; a file has only the metrics.",
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
    parameters and the last and best value of each metric. tensorboard: a folder for each run. safetensors: the best
    checkpoint of a run, also of a sharded model, in a new folder, which `ddptrain predict` accepts; above 5 GB several
    files and an index. Its files are verified first.

    Examples:
        ddptrain results export latest --output metrics
        ddptrain results export latest --format safetensors --output model
    """
    if form is ExportFormat.SAFETENSORS:
        if len(runs) > 1:
            raise UsageError("safetensors is the format of one run's checkpoint: name one run")
        _consolidate(runs[0], output, step, as_json=json)
        return
    if step is not None:
        raise UsageError("--step is the step of a checkpoint: it is for --format safetensors")
    from ddptrain.results.export import export_tables, export_tensorboard

    if "://" in output:
        raise UsageError(f"cannot write {form} to {output}: give a folder")
    views = [view_of(run) for run in dict.fromkeys(runs)]
    made = export_tensorboard if form is ExportFormat.TENSORBOARD else export_tables
    written = [str(path) for path in made(views, Path(output))]
    print_result({"format": str(form), "written": written}, written, as_json=json)


def _consolidate(run: str, output: str, step: int | None, *, as_json: bool) -> None:
    """Write a checkpoint, also of a sharded model, as one safetensors checkpoint; without a GPU."""
    from ddptrain.results.checkpoints import consolidation
    from ddptrain.results.layout import BEST, step_name
    from ddptrain.results.show.render import size

    which = BEST if step is None else step_name(step)
    view = view_of(run)
    checkpoint = view.checkpoint(which)
    target = Path(output).expanduser().absolute()
    done = consolidation.consolidate(checkpoint, target, more=[view.run_json])
    about = {"run_id": view.run_id, "step": done.step, "folder": str(done.folder), "files": list(done.files)}
    text = f"{view.run_id}: step {done.step} written to {done.folder}: {done.tensors:,} tensors, {size(done.n_bytes)}"
    print_result({**about, "tensors": done.tensors, "size_bytes": done.n_bytes}, [text], as_json=as_json)
