"""Writes docs/man/ddptrain.1 from the parser; the wheel installs it as share/man/man1/ddptrain.1."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from ddptrain import __version__
from ddptrain.cli.explain import titles
from ddptrain.cli.main import PROGRAM, app

TARGET = Path(__file__).parents[2] / "docs" / "man" / "ddptrain.1"
_ENVIRONMENT = {
    "DDPTRAIN_LOG": "Writes ddptrain's own log to stderr: debug, info or warning.",
    "DDPTRAIN_MODELS_DIR": "Folder or URL of the model registry; models by default.",
    "XDG_STATE_HOME": "Its folder ddptrain has the records of clusters and of slots in use; ~/.local/state by default.",
    "XDG_CACHE_HOME": "Its folder ddptrain has environments, images and compiled code; ~/.cache by default.",
}
_FILES = {
    "runs/RUN": "The run directory: record, configuration, logs, metrics, checkpoints.",
    "models": "The model registry.",
}


def roff(text: str) -> str:
    """Escape a text for roff: no line begins with a control character, and hyphens can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n"))


def man_page() -> str:
    """Return the page."""
    command = get_command(app)
    lines = [
        f'.TH DDPTRAIN 1 "" "{PROGRAM} {__version__}" "User Commands"',
        ".SH NAME",
        f"{PROGRAM} \\- train PyTorch models with DistributedDataParallel on every GPU of a Dask cluster",
        ".SH SYNOPSIS",
        f".B {PROGRAM}",
        ".I COMMAND",
        "[OPTIONS] [ARGUMENTS]",
        ".SH DESCRIPTION",
        roff(command.help or ""),
        ".SH COMMANDS",
    ]
    root = command.make_context(PROGRAM, ["--help"], resilient_parsing=True)  # its settings hold for all commands
    for path, each in _commands(command, ()):
        lines += _described(path, each, root)
    lines += [".SH EXIT STATUS", *_terms({"0": "succeeded", **_titles()})]
    lines += [".SH ENVIRONMENT", *_terms(_ENVIRONMENT), ".SH FILES", *_terms(_FILES)]
    lines += [
        ".SH SEE ALSO",
        roff("ddptrain explain CODE explains an exit code; ddptrain init --schema prints every field."),
    ]
    return "\n".join([*lines, ""])


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        if not each.hidden:
            yield from _commands(each, (*path, name))


def _described(path: tuple[str, ...], command: Any, root: Any) -> Iterator[str]:
    context = command.make_context(path[-1], [], parent=root, resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "{PROGRAM} {roff(" ".join(path))} {roff(usage)}"'
    for number, paragraph in enumerate((command.help or "").split("\n\n")):
        yield from ((".PP",) if number else ())
        yield roff(" ".join(paragraph.split()))
    records = [param.get_help_record(context) for param in command.get_params(context)]
    yield from _terms({record[0]: record[1] for record in records if record is not None})
    if command.examples:
        yield from (".PP", "Examples:", ".PP", ".EX")
        yield from (f"  {roff(line)}" for line in command.examples)
        yield ".EE"


def _titles() -> dict[str, str]:
    return {str(code): title for code, (title, _) in sorted(titles().items()) if code}


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, text in terms.items():
        yield from (".TP", f"\\fB{roff(' '.join(term.split()))}\\fR", roff(" ".join(text.split())))


def main() -> int:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(man_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
