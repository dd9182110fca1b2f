"""The command `ddptrain`: its subcommands, and the only place that converts errors to exit codes."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.main import get_command

from ddptrain.cli import options as opt
from ddptrain.cli.parser import RootGroup
from ddptrain.cli.printing import say
from ddptrain.errors import ConfigError, DdptrainError, ExitCode, Interrupted, limit_error, one_line
from ddptrain.version import __version__

PROGRAM = "ddptrain"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN_PIPE = 128 + 13  # a shell's exit code for a program that SIGPIPE ended


class Root(RootGroup):
    """All commands, by what they are for, in the order of the help: where each is, and its line in the list."""

    sections: ClassVar = {
        "Train": {
            "train": ("train:train", "Train what a YAML file describes."),
            "run": ("run:COMMAND", "Run a script that torchrun would run."),
            "watch": ("running:watch", "Show a run that another shell has started."),
            "stop": ("running:stop", "End a run that another shell has started."),
            "ui": ("ui:ui", "Show runs, sweeps and models in a browser."),
            "results": ("results:app", "List runs; show one, its logs, its curves; delete old ones."),
        },
        "Search and use": {
            "sweep": ("sweep:sweep", "Search for the best values of some fields."),
            "evaluate": ("trained:evaluate", "Score a run or a model."),
            "predict": ("trained:predict", "Classify images with a trained run."),
            "generate": ("trained:generate", "Make new pet names with a trained run."),
        },
        "Clusters": {
            "cluster": ("cluster:app", "Start a cluster that stays up; look at it, end it."),
            "doctor": ("doctor:doctor", "Check this machine, or all hosts of a cluster."),
        },
        "Unattended": {
            "retrain": ("unattended:retrain", "Train a model again, and use the new version if it is better."),
            "models": ("models:app", "Versions of trained models: list, promote, roll back."),
            "schedule": ("unattended:schedules", "Retrain at given times: add, list, remove."),
            "notify": ("unattended:notifications", "Notifications of runs and retrainings: try them."),
        },
        "More": {
            "init": ("init:init", "Write a starting point for code of your own."),
            "explain": ("explain:explain", "Explain an exit code, or the end of a run."),
        },
    }


def _leave_with(code: int | None, **_: Any) -> None:
    """Exit with the return value of the command."""
    raise typer.Exit(code or 0)


# Without markup the help does not import rich, which takes two thirds of the time.
app = typer.Typer(
    name=PROGRAM,
    cls=Root,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_leave_with,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    runs_dir: opt.RunsDirOption = None,
    models_dir: opt.ModelsDirOption = None,
    verbose: opt.VerboseOption = False,
) -> None:
    """Train PyTorch models on every GPU of a Dask cluster, and show the results.

    --runs-dir, --models-dir and --verbose may stand anywhere in a command.
    """
    opt.PLACES.runs_dir, opt.PLACES.models_dir = runs_dir, models_dir
    opt.log_to_stderr(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv) and return its exit code. Raises nothing.

    Errors are written to stderr. The traceback of a bug is written to a file that stderr names.
    """
    code = _call(argv)
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter's last flush changes the exit code to 120.
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or _BROKEN_PIPE
        if not code:  # otherwise an error was shown, perhaps this one
            say(f"error: standard output can't be written: {error.strerror}")
        return code or ExitCode.CLUSTER
    return code


def _call(argv: Sequence[str] | None) -> int:
    try:
        get_command(app)(args=sys.argv[1:] if argv is None else argv, prog_name=PROGRAM)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except DdptrainError as error:
        if error.exit_code == ExitCode.INTERNAL:
            return _report_bug(error)
        _report(error)
        if _wants_json(sys.argv[1:] if argv is None else argv):
            problems = error.problems if isinstance(error, ConfigError) else ()
            about = {"message": str(error), "problems": [dataclasses.asdict(problem) for problem in problems]}
            print(json.dumps({"event": "error", "exit_code": int(error.exit_code), **about}))
        return error.exit_code
    except Exception as error:  # a full disk, or a bug: the user gets one line and an exit code
        if isinstance(error, OSError) and error.errno in _FULL:
            say(f"error: {error.filename or 'standard output, or a file,'} can't be written: {error.strerror}")
            return ExitCode.CLUSTER
        if (limit := limit_error(error)) is not None:
            _report(limit)
            return limit.exit_code
        return _report_bug(error)
    return ExitCode.SUCCEEDED


def _exit_code(leaving: SystemExit) -> int:
    """Return the exit code that the interpreter would use for this exception."""
    if leaving.code == 1 and isinstance(leaving.__context__, BrokenPipeError):
        return _BROKEN_PIPE  # typer's 1 would mean that training failed
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or ExitCode.SUCCEEDED
    say(leaving.code)
    return ExitCode.TRAINING_FAILED


def _report(error: DdptrainError) -> None:
    """Write the message to stderr; each problem of a configuration has its own line."""
    for problem in error.problems if isinstance(error, ConfigError) else (error,):
        say(str(error) if isinstance(error, Interrupted) else f"error: {problem}")


def _wants_json(argv: Sequence[str]) -> bool:
    """Return whether `--output json` is given: the output is one JSON object on each line."""
    ours = argv[: argv.index("--")] if "--" in argv else argv
    return "--output=json" in ours or ("--output", "json") in itertools.pairwise(ours)


def _report_bug(error: Exception) -> int:
    """Write one line to stderr, and the traceback to a file that it names."""
    import traceback

    summary = one_line("".join(traceback.format_exception_only(error)))
    try:
        where = f"the details are in {_write_crash_log(error)}"
    except OSError as refused:
        where = f"the details could not be written ({refused})"
        traceback.print_exception(error)
    say(f"internal error: {summary}; this is a bug of {PROGRAM}, {where}")
    return ExitCode.INTERNAL


def _write_crash_log(error: Exception) -> Path:
    """Write the traceback to a new file that only this user can read; return its path. Raises OSError."""
    import tempfile
    import traceback

    # Only the name of the command: its options may contain secrets.
    command = " ".join(sys.argv[1:2])
    header = f"{PROGRAM} {__version__}, Python {sys.version}, {sys.platform}\ncommand: {command}\n\n"
    text = header + "".join(traceback.format_exception(error))
    prefix = f"crash-{datetime.now(UTC):%Y%m%d-%H%M%S}-"
    descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=_crash_dir())
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return Path(path)


def _crash_dir() -> Path | None:
    """Return the folder of the crash logs, or None for the system's temporary folder."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home directory
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        folder = Path(state) / PROGRAM
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None
