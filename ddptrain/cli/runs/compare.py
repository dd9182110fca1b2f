"""`ddptrain results compare`: what differs between runs, their metrics and curves."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.options import JsonOption
from ddptrain.cli.printing import print_json, write
from ddptrain.cli.runs.choice import RunNames, view_of
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.results.show.plot import Style


class Align(StrEnum):
    """The values of --align."""

    STEP = "step"
    EPOCH = "epoch"


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
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the curves as a picture: .png, .svg or .pdf.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare runs: parameters, configuration, code, data, versions, metrics and curves. Of one run: draw its curves.

    Differences of values are to the first run. Tables show only what differs.
    """
    from ddptrain.results.compare import compare_runs, comparison_text
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.show.plot import save_picture, terminal_charts

    if len(runs) == 1:
        _draw(runs[0], metric or (), plot, as_json=json)
        return

    views = [view_of(run, NeededFiles.COMPARISON) for run in runs]
    found = compare_runs(views, None if align is None else align.value, metric or ())
    has_curves = any(panel.curves for panel in found.plot.panels)
    if plot is not None:
        if not has_curves:
            raise UsageError("the runs have logged no metrics, so there is nothing to draw; leave out --plot")
        save_picture(found.plot, plot, option="--plot")
    if json:
        print_json({**found.as_dict(), "file": None if plot is None else str(plot)})
        return
    write([comparison_text(found)])
    if has_curves:
        write(["", terminal_charts(found.plot, chart_style())], colours=True)
    if plot is not None:
        write([f"picture: {plot}"])


def _draw(run: str, metrics: Sequence[str], picture: Path | None, *, as_json: bool) -> None:
    """Draw the curves of one run, in the terminal and as a picture."""
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.show.curves import plot_data, plot_of
    from ddptrain.results.show.plot import save_picture, terminal_charts

    view = view_of(run, NeededFiles.METRICS)
    drawing = plot_of(view, metrics)
    if picture is not None:
        save_picture(drawing, picture, view.record.best, option="--plot")
    if as_json:
        file = None if picture is None else str(picture)
        print_json({"run_id": view.run_id, "file": file, "x": drawing.x_name, "series": plot_data(drawing)})
        return
    write([terminal_charts(drawing, chart_style())], colours=True)
    if picture is not None:
        write([f"picture: {picture}"])


def chart_style() -> Style:
    """Return the style of charts that the terminal can show."""
    import shutil

    from ddptrain.results.show.plot import Style

    is_terminal = sys.stdout.isatty()
    can_show = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    size = shutil.get_terminal_size()
    return Style(
        width=size.columns if is_terminal else 80,
        height=min(20, max(8, size.lines - 10)) if is_terminal else 16,
        unicode=is_terminal and can_show,
        colour=is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )
