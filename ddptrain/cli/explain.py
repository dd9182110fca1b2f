"""`ddptrain explain CODE|RUN`: the section of an exit code; of a run the end, its cause, and that section."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_result
from ddptrain.errors import UsageError

_PAGE = "troubleshooting.md"
_HIGHEST_CODE = 255
_TITLE = re.compile(r"^\| (?:\[(\d+)\]\(#([\w-]+)\)|(\d+)) \| (.+) \|$", re.MULTILINE)


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|RUN",
            autocompletion=complete.runs,
            help="An exit code, or a run: its id, the start of one, latest, a URL.",
        ),
    ] = "latest",
    json: opt.JsonOption = False,
) -> None:
    """Explain an exit code: likely causes, and what to do. Or a run: its end, its cause, and the text on its exit code.

    Examples:
        ddptrain explain 5
        ddptrain explain latest
    """
    if not re.fullmatch(r"[0-9]{1,3}", what):
        _explain_run(what, as_json=json)
        return
    code = int(what)
    if code > _HIGHEST_CODE:
        raise UsageError(f"{code} is not an exit code: exit codes are 0 to {_HIGHEST_CODE}")
    title, text = _explained(code)
    if not title:
        known = ", ".join(map(str, titles()))
        raise UsageError(f"{code} is not an exit code of ddptrain; its exit codes: {known}")
    lines = [f"exit code {code}: {title}", *([""] if text else []), *text]
    print_result({"exit_code": code, "title": title, "text": "\n".join(text)}, lines, as_json=json)


def _explain_run(run: str, *, as_json: bool) -> None:
    from ddptrain.results.run_record import RunStatus, root_cause
    from ddptrain.results.runs import open_runs_dir, split_run

    place, name = split_run(run, opt.PLACES.runs)
    view = open_runs_dir(place).find(name)
    if view.status == RunStatus.QUEUED:
        from ddptrain.driver.submit import settled

        view = settled(view)
    record, run_id = view.record, view.run_id
    option = "" if place == opt.DEFAULT_RUNS_DIR else f" --runs-dir {shlex.quote(place)}"
    code = None if view.goes_on else record.exit_code  # the end of a killed driver is not recorded
    if view.problem:
        end = f"is not readable: {view.problem}"
    elif view.goes_on:
        where = record.driver.description if view.is_running else ", ".join(job.description for job in record.jobs[-1:])
        end = f"is {view.shown_status}{where and f' in {where}'}"
    else:
        end = f"{view.status_text} (exit code {code})" if code is not None else f"{view.status}, without an exit code"
    cause = root_cause(record.failure)
    look = f"ddptrain results show {run_id}{option} (everything that is known of it)"
    rank = "" if record.failure is None or record.failure.rank is None else f" --rank {record.failure.rank}"
    following = [look, f"ddptrain results logs {run_id}{rank}{option}"]
    if view.goes_on:
        following += [f"ddptrain {verb} {run_id}{option}" for verb in ("watch", "stop")]
    elif view.status != RunStatus.SUCCEEDED and record.checkpoints:
        following.append(f"the same command again, with --resume {run_id} (continues from {record.checkpoints[0]})")
    title, text = _explained(code) if code else ("", [])
    lines = [f"run {run_id} {end}", *(["", "root cause:", f"  {cause}"] if cause else []), "", "next:"]
    lines += [*(f"  {line}" for line in following), *(["", f"exit code {code}: {title}", ""] if title else []), *text]
    about = {"run_id": run_id, "status": view.shown_status, "exit_code": code, "end": end, "root_cause": cause}
    print_result({**about, "next": following, "title": title, "text": "\n".join(text)}, lines, as_json=as_json)


def titles() -> dict[int, tuple[str, str]]:
    """Return the title of each exit code, and the anchor of its section ("": it has none)."""
    return {int(row[1] or row[3]): (row[4], row[2] or "") for row in _TITLE.finditer(_page())}


def _explained(code: int) -> tuple[str, list[str]]:
    """Return the title of an exit code, "" if it is unknown, and the lines of its section."""
    known = titles()
    if code in known:
        title, anchor = known[code]
        number = anchor.partition("-")[0]
        sections = re.split(r"^## ", _page(), flags=re.MULTILINE)
        section = next((each for each in sections if number and re.match(rf"{number}\b", each)), "")
        return title, list(_as_text(section.partition("\n")[2].strip()))
    if code - 128 in signal.valid_signals():
        return f"ended by {signal.Signals(code - 128).name}; the shell adds 128 to a signal", []
    return "", []


def _page() -> str:
    """Return docs/troubleshooting.md, from the package or from the checkout."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / _PAGE, package.parent / "docs" / _PAGE) if path.exists()).read_text("utf-8")


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
