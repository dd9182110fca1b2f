"""Shows a comparison of runs as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddptrain.config.wording import counted
from ddptrain.results.compare.comparison import Comparison, MetricComparison, Values, changes, labels
from ddptrain.results.compare.differences import Differences
from ddptrain.results.select.table import value_text
from ddptrain.results.show.render import HEADER, rows
from ddptrain.text_tables import clean_line, number, plain_table

_LONGEST_VALUE = 32
_MOST_ROWS = 60  # of a section; --json has all
_NOTE_CHARACTERS = 60


def comparison_text(comparison: Comparison) -> str:
    """Return the runs, what differs, and the metrics, in columns A, B, ...; curves are left out."""
    tables = [_runs(comparison)]
    same = []
    for section, differences in comparison.differences.items():
        if differences:
            tables.append(_differences(section, differences, labels(comparison.views)))
        else:
            same.append(section)
    if same:
        tables.append(f"no differences, or not recorded: {', '.join(same)}")
    if comparison.metrics:
        tables.append(_metrics(comparison))
    return "\n\n".join(tables)


def _runs(comparison: Comparison) -> str:
    views = comparison.views
    annotated = [view.annotations for view in views]
    table = [["", *HEADER, "TAGS", "NOTE"]]
    for label, row, marks in zip(labels(views), rows(views), annotated, strict=True):
        table.append([label, *row, " ".join(marks.tags), value_text(marks.note or None, _NOTE_CHARACTERS)])
    for title, cells in (("TAGS", [marks.tags for marks in annotated]), ("NOTE", [marks.note for marks in annotated])):
        if not any(cells):
            column = table[0].index(title)
            table = [row[:column] + row[column + 1 :] for row in table]
    return plain_table([[clean_line(cell) for cell in row] for row in table])


def _differences(section: str, differences: Differences, names: Sequence[str]) -> str:
    table = [[section, *names]]
    for name, values in list(differences.items())[:_MOST_ROWS]:
        table.append([clean_line(f"  {name}"), *(clean_line(value_text(value, _LONGEST_VALUE)) for value in values)])
    more = len(differences) - _MOST_ROWS
    return plain_table(table) + (f"\n  and {counted(more, 'more difference')}: see --json" if more > 0 else "")


def _metrics(comparison: Comparison) -> str:
    table = [["metrics", "", *labels(comparison.views)]]
    for metric in comparison.metrics[:_MOST_ROWS]:
        table.append([clean_line(f"  {metric.name}"), "last", *_values(metric.last)])
        if metric.goal:
            table.append(["", f"best ({metric.goal})", *_best(metric)])
    more = len(comparison.metrics) - _MOST_ROWS
    return plain_table(table) + (f"\n  and {counted(more, 'more metric')}: see --json" if more > 0 else "")


def _values(values: Values) -> list[str]:
    """Return each value with its difference to the first value."""
    return [
        number(value) + (f" ({change:+.4g})" if place and change is not None and math.isfinite(change) else "")
        for place, (value, change) in enumerate(zip(values, changes(values), strict=True))
    ]


def _best(metric: MetricComparison) -> list[str]:
    """Return what _values returns, with a mark at the best run."""
    return [text + (" *" if place == metric.winner else "") for place, text in enumerate(_values(metric.best))]
