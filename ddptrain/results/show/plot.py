"""Draws the curves of a run, as a picture in a file and as text."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.errors import UsageError
from ddptrain.results.errors import ResultsError
from ddptrain.results.run_record import BestRecord
from ddptrain.results.secure_files import write_file
from ddptrain.results.show.chart import ChartLine, Style, draw_chart
from ddptrain.results.show.curves import Curve, Panel, Plot
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
_COLOURS = ("#1f6fb4", "#d9570f", "#2a8c46", "#8a4fb8", "#b8860b", "#5b6770")
_FEW_POINTS = 40
_X_LABELS = {"step": "step", "epoch": "epoch", "time_s": "seconds"}


def save_picture(plot: Plot, out: Path, best: BestRecord | None = None, *, option: str = "--out") -> None:
    """Write the picture to `out`, a panel per quantity; the lines of single ranks are faint, their mean is not.

    `option` is the option of the command line that names the file, for messages.

    Raises UsageError if the file can't be written, or its extension is not one of FORMATS.
    """
    kind = out.suffix.lower().removeprefix(".") or "png"
    if kind not in FORMATS:
        raise UsageError(f"cannot draw a .{kind} file; give {option} a name that ends in .{', .'.join(FORMATS)}")
    # pyplot would keep figures alive and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 3.8 * len(plot.panels)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(f"{plot.run_id}  ·  {plot.status}"), fontsize=12)
    axes = figure.subplots(len(plot.panels), 1, squeeze=False, sharex=True)[:, 0]
    for axis, panel in zip(axes, plot.panels, strict=True):
        _draw_panel(axis, panel, best, plot.x_name)
    axes[-1].set_xlabel(_X_LABELS[plot.x_name])
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a character that the font lacks is drawn as a box
        figure.savefig(buffer, format=kind)
    try:
        write_file(out, buffer.getvalue())
    except ResultsError as error:
        cause = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise UsageError(f"cannot write {out}: {cause}; choose another file with {option}") from error


def _draw_panel(axis: Axes, panel: Panel, best: BestRecord | None, x_name: str) -> None:
    for index, curve in enumerate(panel.curves):
        colour = _COLOURS[index % len(_COLOURS)]
        if curve.is_mean:
            for points in curve.ranks.values():
                axis.plot(*points, color=colour, alpha=0.28, linewidth=0.9)
        marker = "o" if len(curve.main[0]) <= _FEW_POINTS else ""
        label = _literal(curve.label)
        axis.plot(*curve.main, color=colour, linewidth=1.9, marker=marker, markersize=3.5, label=label)
        if best is not None and best.metric == curve.name and x_name == "step":
            _mark_best(axis, best, colour)
    axis.set_ylabel(_literal(panel.quantity))
    axis.grid(visible=True, color="#d8dce0", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.02)
    axis.legend(frameon=False, fontsize=9)


def _literal(text: str) -> str:
    """Return the text with escaped dollar signs, between which matplotlib would read a formula."""
    return clean_line(text).replace("$", r"\$")


def _mark_best(axis: Axes, best: BestRecord, colour: str) -> None:
    axis.plot(
        [best.step],
        [best.value],
        linestyle="",
        marker="*",
        markersize=13,
        color=colour,
        markeredgecolor="white",
        zorder=5,
        label=f"best: {best.value:.4g} at step {best.step}",
    )


def terminal_charts(plot: Plot, style: Style) -> str:
    """Return the curves as text, a chart per quantity."""
    x_label = _X_LABELS[plot.x_name]
    return "\n\n".join(
        draw_chart(clean_line(panel.quantity), x_label, [_line(curve) for curve in panel.curves], style)
        for panel in plot.panels
    )


def _line(curve: Curve) -> ChartLine:
    last = next((value for value in reversed(curve.main[1]) if value == value), None)
    label = clean_line(curve.label)
    return ChartLine(label if last is None else f"{label}: {last:.4g}", *curve.main)
