"""`ddptrain explain CODE|RUN`: the page of an exit code, or how a run ended, and what to do."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import DEFAULT_RUNS_DIR, PLACES, JsonOption
from ddptrain.cli.printing import print_result
from ddptrain.errors import UsageError

_PAGES = "troubleshooting"
_HIGHEST_CODE = 255
_TITLE = re.compile(r"^\| (?:\[(\d+)\]\(([\w.-]+)[^)]*\)|(\d+)) \| (.+) \|$", re.MULTILINE)


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|RUN",
            autocompletion=complete.runs,
            help="An exit code, or a run: its id, the start of one, latest, a URL.",
        ),
    ] = "latest",
    json: JsonOption = False,
) -> None:
    """Explain an exit code: likely causes, and what to do. Or a run: its cause, where to look, what is next.

    Examples:
        ddptrain explain 5
        ddptrain explain latest
    """
    if re.fullmatch(r"[0-9]{1,3}", what):
        _explain_code(int(what), as_json=json)
    else:
        _explain_run(what, as_json=json)


def titles() -> dict[int, tuple[str, str]]:
    """Return the title of each exit code, and the file of its page ("": it has none)."""
    rows = _TITLE.finditer(_page("index.md"))
    return {int(row[1] or row[3]): (row[4], row[2] or "") for row in rows}


def _explain_code(code: int, *, as_json: bool) -> None:
    if code > _HIGHEST_CODE:
        raise UsageError(f"{code} is not an exit code: exit codes are 0 to {_HIGHEST_CODE}")
    known = titles()
    if code in known:
        title, page = known[code]
    elif code - 128 in signal.valid_signals():
        title, page = f"ended by {signal.Signals(code - 128).name}; the shell adds 128 to a signal", ""
    else:
        raise UsageError(f"{code} is not an exit code of ddptrain; its exit codes: {', '.join(map(str, known))}")
    text = list(_as_text(_section(_page(page), code))) if page else []
    lines = [f"exit code {code}: {title}", *([""] if text else []), *text]
    print_result({"exit_code": code, "title": title, "text": "\n".join(text)}, lines, as_json=as_json)


def _page(name: str) -> str:
    """Return a page of docs/troubleshooting, from the package or from the checkout."""
    package = Path(__file__).parents[1]
    folder = next((each for each in (package / _PAGES, package.parent / "docs" / _PAGES) if each.is_dir()), package)
    return (folder / name).read_text(encoding="utf-8")


def _section(page: str, code: int) -> str:
    """Return the section of an exit code, of a page with several; otherwise the page without its title."""
    sections = re.split(r"^##? ", page, flags=re.MULTILINE)
    chosen = next((each for each in sections if each.startswith(f"{code}: ")), page)
    return chosen.partition("\n")[2].strip()


def _as_text(page: str) -> Iterator[str]:
    """Yield the lines of a page for a terminal: causes with what to do, without links and comments."""
    for line in page.splitlines():
        if line.startswith(("<!--", "```", "|---", "| cause")):
            continue
        plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", line).replace("`", "").lstrip("# ")
        if plain.startswith("| "):
            cause, action = plain.strip("| ").split(" | ", 1)
            yield f"- {cause}"
            yield f"  -> {action}"
        else:
            yield plain


def _explain_run(run: str, *, as_json: bool) -> None:
    from ddptrain.results.runs import NeededFiles, open_runs_dir, split_run
    from ddptrain.results.show.explanation import explain_run

    place, name = split_run(run, PLACES.runs)
    view = open_runs_dir(place).find(name, NeededFiles.EVENTS)
    option = "" if place == DEFAULT_RUNS_DIR else f" --runs-dir {shlex.quote(place)}"
    explained = explain_run(view, option)
    print_result(explained.as_dict(), explained.as_text(), as_json=as_json)
