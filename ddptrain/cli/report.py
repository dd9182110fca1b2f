"""`ddptrain results report`: writes one HTML file about runs, a sweep or a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ddptrain.cli.models import DEFAULT_MODELS_DIR, ModelsDir
from ddptrain.cli.printing import print_json, say, write

_LATEST = "latest"
_EVERY_S = 10


def report(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP|MODEL]...",
            help="Runs (an id, the start of one, latest, a directory, a URL), a sweep, a model as petnames@champion.  "
            "[default: latest]",
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = "report.html",
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the file again and again until no run is running; it reloads itself.")
    ] = False,
    every: Annotated[
        int, typer.Option("--every", min=1, max=3600, metavar="SECONDS", help="With --watch: how often.")
    ] = _EVERY_S,
    runs_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Folder that holds the runs, or s3://bucket/folder.  [default: runs]"),
    ] = None,
    models_dir: ModelsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Write one HTML file: curves, timeline, failure, logs, images, tables and configuration.

    The file contains everything that it shows. It can be sent by mail and opened without a network. Several runs are
    compared in the same curves.
    """
    import time

    from ddptrain.file_ops import write_atomic
    from ddptrain.reports.destinations import writable_file
    from ddptrain.reports.html.page import html_page
    from ddptrain.reports.html.subjects import find_subjects
    from ddptrain.results.errors import naming

    given_before = ctx.obj if isinstance(ctx.obj, str) else None
    places = (runs_dir or given_before or "runs", models_dir or DEFAULT_MODELS_DIR)
    path = writable_file("--output", output)
    is_first = True
    try:
        while True:
            subjects = find_subjects(names or [_LATEST], *places)
            goes_on = watch and subjects.are_running
            page = html_page(subjects, reload_s=every if goes_on else None, was_watched=watch)
            with naming(path):
                write_atomic(path, page, durable=False)
            if is_first and goes_on and not as_json:
                say(f"{path} is written every {every} s until the run is over; Ctrl-C ends this")
            is_first = False
            if not goes_on:
                break
            time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        runs = [view.run_id for view in subjects.views]
        models = [str(model.chosen.version) for model in subjects.models]
        sweep = subjects.sweep.name if subjects.sweep else None
        print_json({"file": str(path), "size_bytes": len(page), "runs": runs, "sweep": sweep, "versions": models})
    else:
        write([f"report: {path} ({len(page) / 1e6:.1f} MB)"])
