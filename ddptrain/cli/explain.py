"""`ddptrain explain CODE|RUN`: what an exit code means, or how a run ended, and what to do."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import DEFAULT_RUNS_DIR, PLACES, JsonOption
from ddptrain.cli.printing import print_result
from ddptrain.errors import UsageError

_HIGHEST_CODE = 255


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|RUN",
            autocompletion=complete.runs,
            help="An exit code, or a run: its id, the start of one, latest, a URL.",
        ),
    ] = "latest",
    every: Annotated[bool, typer.Option("--all", help="All causes of an exit code, not only the most likely.")] = False,
    json: JsonOption = False,
) -> None:
    """Explain an exit code: likely causes, and what to do. Or a run: its cause, where to look, what is next."""
    if re.fullmatch(r"[0-9]{1,3}", what):
        _explain_code(int(what), every, json)
    else:
        _explain_run(what, json)


def _explain_code(code: int, every: bool, json: bool) -> None:
    from ddptrain.explain import EXPLANATIONS, as_text, explanation_of, is_known

    if code > _HIGHEST_CODE:
        raise UsageError(f"{code} is not an exit code: exit codes are 0 to {_HIGHEST_CODE}")
    if not is_known(code):
        listed = ", ".join(str(int(each)) for each in sorted(EXPLANATIONS))
        raise UsageError(f"{code} is not an exit code of ddptrain; its exit codes: {listed}")
    known = explanation_of(code)
    texts = {"example": known.example.splitlines(), "remarks": known.remarks.splitlines()}
    data = {"exit_code": code, **dataclasses.asdict(known), **texts}
    print_result(data, as_text(code, complete=every), as_json=json)


def _explain_run(run: str, json: bool) -> None:
    from ddptrain.results.remote.runs import open_runs_dir, split_run
    from ddptrain.results.run_store import NeededFiles
    from ddptrain.results.show.explanation import explain_run

    place, name = split_run(run, PLACES.runs)
    view = open_runs_dir(place).find(name, NeededFiles.EVENTS)
    option = "" if place == DEFAULT_RUNS_DIR else f" --runs-dir {shlex.quote(place)}"
    explained = explain_run(view, option)
    print_result(explained.as_dict(), explained.as_text(), as_json=json)
