"""`ddptrain results report`: writes one HTML file about runs or a sweep."""

from __future__ import annotations

from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_result
from ddptrain.errors import RunNotFound, UsageError

_LATEST = "latest"


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
    """
    from ddptrain.file_ops import write_atomic
    from ddptrain.reports.destinations import writable_file
    from ddptrain.reports.html.page_content import find_subjects, html_page
    from ddptrain.results.errors import results_errors

    if output == "-":
        raise UsageError("--output -: a page is written to a file; name one, as report.html")
    place = PLACES.runs
    subjects = find_subjects([_newest(place) if name == _LATEST else name for name in names or [_LATEST]], place)
    sweep = subjects.sweep.record.sweep_id if subjects.sweep else None
    name = "report" if len(names or ()) > 1 else sweep or subjects.views[0].run_id
    path = writable_file("--output", output or f"{name}.html")
    page = html_page(subjects)
    with results_errors(path):
        write_atomic(path, page, durable=False)
    data = {
        "file": str(path),
        "size_bytes": len(page),
        "runs": [view.run_id for view in subjects.views],
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
    return run.layout.root.name
