"""Curves in Markdown: a sparkline of block characters, and charts that GitHub and GitLab draw from Mermaid text.

Pictures are no choice: both services remove `data:` addresses, and a report has no place to upload a file to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from ddptrain.reports.markdown_text import code, fenced
from ddptrain.results.show.curves import Curve, Panel, Plot, Points

MOST_LINES = 4  # per chart: more cannot be distinguished
_MOST_CHARTS = 4
_POINTS = 60  # per line; Gitea draws texts of up to 5,000 characters
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
_DOTS = ("🔵", "🟠", "🟢", "🔴")  # the same colours: xychart has no legend
_SETTINGS = (
    "%%{init: {'xyChart': {'width': 800, 'height': 300}, 'themeVariables': {'xyChart': "
    f"{{'plotColorPalette': '{', '.join(_COLOURS)}'}}}}}}}}%%"
)
_UNSAFE = re.compile(r"[\"`#;<>&{}\\\r\n]")
_LARGEST = 1e12  # xychart does not read exponents


def sparkline(values: Sequence[float]) -> str:
    """Return the values as block characters, at most 24; "" for fewer than two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    width = min(_SPARK_WIDTH, len(finite))
    starts = [len(finite) * at // width for at in range(width + 1)]
    means = [fmean(finite[start:end]) for start, end in pairwise(starts)]
    low, high = min(means), max(means)
    if high == low or not math.isfinite(high - low):
        return _SPARKS[0] * width
    scale = (len(_SPARKS) - 1) / (high - low)
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def charts(plot: Plot) -> list[str]:
    """Return at most four charts as Markdown: a legend and a Mermaid block each.

    They show what belongs to a data set, as val/accuracy, losses first; if there is no such metric, all metrics.
    """
    of_data = [panel for panel in plot.panels if "loss" in panel.quantity or any("/" in c.name for c in panel.curves)]
    panels = sorted(of_data or plot.panels, key=lambda panel: "loss" not in panel.quantity)
    drawn = [_chart(group, plot.x_name) for panel in panels for group in _groups(panel)]
    return [text for text in drawn if text][:_MOST_CHARTS]


def _groups(panel: Panel) -> list[list[Curve]]:
    """Return curves that share a chart: those whose common range of x is at least half of the whole range."""
    curves = [curve for curve in panel.curves if len(_finite(curve.main)[0]) > 1][:MOST_LINES]
    if not curves:
        return []
    starts, ends = zip(*(_range(_finite(curve.main)[0]) for curve in curves), strict=True)
    shared, whole = min(ends) - max(starts), max(ends) - min(starts)
    return [curves] if 2 * shared >= whole > 0 else [[curve] for curve in curves]


def _finite(points: Points) -> Points:
    kept = [(x, y) for x, y in zip(*points, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _chart(curves: Sequence[Curve], x_name: str) -> str:
    lines = [_finite(curve.main) for curve in curves]
    start, end = max(min(x) for x, _ in lines), min(max(x) for x, _ in lines)
    values = [_resampled(line, start, end) for line in lines]
    low, high = _range([value for line in values for value in line])
    if end <= start or max(abs(low), abs(high), abs(start), abs(end)) > _LARGEST:
        return ""
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    legend = " ".join(f"{dot} {code(curve.label)}" for dot, curve in zip(_DOTS, curves, strict=False))
    number, x_number = _formatter(high - low or margin), _formatter(end - start)
    x_title = "seconds" if x_name == "time_s" else x_name
    y_title = _UNSAFE.sub(" ", curves[0].name.rpartition("/")[2])
    text = "\n".join(
        [
            _SETTINGS,
            "xychart-beta",
            f'  x-axis "{x_title}" {x_number(start)} --> {x_number(end)}',
            f'  y-axis "{y_title}" {number(low - margin)} --> {number(high + margin)}',
            *(f"  line [{', '.join(number(value) for value in line)}]" for line in values),
        ]
    )
    return f"{legend}\n\n{fenced(text, 'mermaid')}"


def _formatter(span: float) -> Callable[[float], str]:
    """Return a function that formats numbers without an exponent, with about four digits of the range."""
    digits = min(20, max(0, 4 - math.floor(math.log10(span))))

    def formatted(value: float) -> str:
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text

    return formatted


def _resampled(line: Points, start: float, end: float) -> list[float]:
    """Return the values at points of equal distance from `start` to `end`; of many points, the means of neighbours."""
    import numpy as np

    order = np.argsort(line[0], kind="stable")
    x, y = np.asarray(line[0])[order], np.asarray(line[1])[order]
    count = max(2, min(_POINTS, int(((start <= x) & (x <= end)).sum())))
    if len(x) > 2 * _POINTS:
        x, y = (np.array([part.mean() for part in np.array_split(values, _POINTS)]) for values in (x, y))
    return [float(value) for value in np.interp(np.linspace(start, end, count), x, y)]
