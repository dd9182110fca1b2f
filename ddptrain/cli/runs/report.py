"""`ddptrain results report`: writes one HTML file about runs, a sweep or a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_result, say
from ddptrain.errors import RunNotFound, UsageError

if TYPE_CHECKING:
    from ddptrain.reports.html.subjects import Subjects

_LATEST = "latest"
_EVERY_S = 10


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|SWEEP|MODEL",
            autocompletion=complete.runs_or_models,
            help="Runs (an id, the start of one, latest, SWEEP/7, a directory, a URL), a sweep, a model as "
            "petnames@champion.  [default: latest]",
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
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the file again and again until no run is running; it reloads itself.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file: curves, timeline, failure, logs, images, tables and configuration.

    The file contains everything that it shows. It can be sent by mail and opened without a network. Several runs are
    compared in the same curves.
    """
    from ddptrain.reports.destinations import writable_file

    if output == "-":
        raise UsageError("--output -: a page is written to a file; name one, as report.html")
    places = (PLACES.runs, PLACES.models)
    wanted = [_fixed(name, places[0]) for name in names or [_LATEST]]
    path = writable_file("--output", output or _default_name(wanted, places))
    subjects, size_bytes = _written(path, wanted, places, _EVERY_S if watch else None, is_silent=as_json)
    data = {
        "file": str(path),
        "size_bytes": size_bytes,
        "runs": [view.run_id for view in subjects.views],
        "sweep": subjects.sweep.name if subjects.sweep else None,
        "models": [f"{model.name}@{model.chosen.version}" for model in subjects.models],
    }
    print_result(data, [f"report: {path} ({size_bytes / 1e6:.1f} MB)"], as_json=as_json)


def _default_name(names: list[str], places: tuple[str, str]) -> str:
    """Return a file name that differs for each run, sweep and version, so that no other page is overwritten."""
    from ddptrain.reports.html.subjects import find_subjects

    if len(names) > 1:
        return "report.html"
    subjects = find_subjects(names, *places)
    if subjects.sweep is not None:
        return f"{subjects.sweep.name}.html"
    if subjects.models:
        return f"{subjects.models[0].name}-{subjects.models[0].chosen.version}.html"
    return f"{subjects.views[0].run_id}.html"


def _written(
    path: Path, names: list[str], places: tuple[str, str], every_s: int | None, *, is_silent: bool
) -> tuple[Subjects, int]:
    """Write the page; with `every_s` again and again while a run is running. Returns what it is about, and its size."""
    import time

    from ddptrain.file_ops import write_atomic
    from ddptrain.reports.html.page_content import html_page
    from ddptrain.reports.html.subjects import find_subjects
    from ddptrain.results.errors import results_errors

    def put(reload_s: int | None) -> int:
        page = html_page(subjects, reload_s=reload_s, was_watched=every_s is not None)
        with results_errors(path):
            write_atomic(path, page, durable=False)
        return len(page)

    is_first = True
    while True:
        subjects = find_subjects(names, *places)
        if every_s is None or not subjects.are_running:
            return subjects, put(None)
        try:
            put(every_s)
            if is_first and not is_silent:
                say(f"{path} is written every {every_s} s until the run is over; Ctrl-C ends this")
            is_first = False
            time.sleep(every_s)
        except KeyboardInterrupt:
            put(None)  # nobody writes it again: it must not wait for that
            raise typer.Exit(130) from None


def _fixed(name: str, runs_dir: str) -> str:
    """Return what `latest` stands for now, the newest run or sweep: with --watch another one may start.

    Other names stay. Raises RunNotFound.
    """
    from ddptrain.results.remote.runs import open_runs_dir
    from ddptrain.sweep.folder import sweeps_in

    if name != _LATEST:
        return name
    sweeps = sweeps_in(Path(runs_dir))  # none for a URL
    sweep = next(iter(sweeps), None)
    try:
        run = open_runs_dir(runs_dir).find(_LATEST)
    except RunNotFound:
        if sweep is None:
            raise
        return sweep
    if sweep is not None and sweeps[sweep].started_at > (run.record.started_at or ""):
        return sweep
    return run.layout.root.name
