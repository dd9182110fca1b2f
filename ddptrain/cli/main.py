"""The command `ddptrain`: its subcommands, and the only place that converts errors to exit codes."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command
from typer.models import CommandInfo

from ddptrain import __version__
from ddptrain.cli import options as opt
from ddptrain.cli.cluster import app as cluster
from ddptrain.cli.doctor import doctor
from ddptrain.cli.examples import add_examples, command_name
from ddptrain.cli.explain import explain
from ddptrain.cli.init import init
from ddptrain.cli.models.evaluate import evaluate
from ddptrain.cli.models.generate import generate
from ddptrain.cli.models.models import app as models
from ddptrain.cli.models.predict import predict
from ddptrain.cli.printing import say
from ddptrain.cli.results import app as results
from ddptrain.cli.run import SCRIPT_SETTINGS, RunCommand, run
from ddptrain.cli.stop import stop
from ddptrain.cli.sweep import sweep
from ddptrain.cli.train import train
from ddptrain.cli.unattended.notify import app as notify
from ddptrain.cli.unattended.retrain import retrain
from ddptrain.cli.unattended.schedule import app as schedule
from ddptrain.cli.usage_errors import RootGroup
from ddptrain.cli.watch import watch
from ddptrain.errors import ConfigError, DdptrainError, ExitCode, Interrupted, limit_error, one_line

PROGRAM = "ddptrain"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN_PIPE = 128 + 13  # a shell's exit code for a program that SIGPIPE ended


def _leave_with(code: int | None, **_: Any) -> None:
    """Exit with the return value of the command."""
    raise typer.Exit(code or 0)


# Without markup the help does not import rich, which takes two thirds of the time.
app = typer.Typer(
    name=PROGRAM,
    cls=RootGroup,
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


# One line for each in the list of commands; `--help` of a command has the full text.
app.command("train", short_help="Train what a YAML file describes.")(train)
app.command(
    "run", cls=RunCommand, short_help="Run a script that torchrun would run.", context_settings=SCRIPT_SETTINGS
)(run)
app.command("retrain", short_help="Train a model again, and use the new version if it is better.")(retrain)
app.command("sweep", short_help="Search for the best values of some fields.")(sweep)
app.command("watch", short_help="Show a run that another shell has started.")(watch)
app.command("stop", short_help="End a run that another shell has started.")(stop)
app.add_typer(cluster, name="cluster")
app.command("evaluate", short_help="Score a run or a model.")(evaluate)
app.command("generate", short_help="Make new pet names with a trained run.")(generate)
app.command("predict", short_help="Classify images with a trained run.")(predict)
app.add_typer(results, name="results")
app.add_typer(models, name="models")
app.add_typer(notify, name="notify")
app.add_typer(schedule, name="schedule")
app.command("doctor", short_help="Check this machine, or all hosts of a cluster.")(doctor)
app.command("explain", short_help="Explain an exit code, or the end of a run.")(explain)
app.command("init", short_help="Write a starting point for code of your own.")(init)
add_examples(app)


@functools.cache
def command_tree(full: typer.Typer, names: frozenset[str]) -> Callable[..., Any]:
    """Return the commands of these names with their options: typer reads the signatures of functions, which is slow."""
    return get_command(_app_for(full, names))


def _names(full: typer.Typer) -> Iterator[str]:
    """Yield the names of all commands and groups."""
    yield from map(command_name, full.registered_commands)
    for group in full.registered_groups:
        yield group.name or ""
        if group.typer_instance is not None:
            yield from _names(group.typer_instance)


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
            _say(f"error: standard output can't be written: {error.strerror}")
        return code or ExitCode.CLUSTER
    return code


def _app_for(full: typer.Typer, words: Container[str]) -> typer.Typer:
    """Return the app with empty commands in place of those that `words` do not contain: to build all takes 70 ms."""
    lean = copy.copy(full)
    lean.registered_commands = [_named_or_empty(info, words) for info in full.registered_commands]
    lean.registered_groups = [copy.copy(info) for info in full.registered_groups]
    for info in lean.registered_groups:
        if info.typer_instance is not None:
            info.typer_instance = _app_for(info.typer_instance, words if info.name in words else ())
    return lean


def _named_or_empty(info: CommandInfo, words: Container[str]) -> CommandInfo:
    name = command_name(info)
    if name in words:
        return info

    def empty() -> None:
        """Do nothing: the placeholder for a command that is listed but not called."""

    empty.__doc__ = getattr(info.callback, "__doc__", None)
    other = copy.copy(info)
    other.name, other.callback = name, empty
    return other


def _call(argv: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        names = {*_names(app)}
        called = names if "_DDPTRAIN_COMPLETE" in os.environ else names & {*words}  # TAB needs the options of each
        command_tree(app, frozenset(called))(args=words, prog_name=PROGRAM)
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
            _say(f"error: {error.filename or 'standard output, or a file,'} can't be written: {error.strerror}")
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
    _say(leaving.code)
    return ExitCode.TRAINING_FAILED


def _report(error: DdptrainError) -> None:
    """Write the message to stderr; each problem of a configuration has its own line."""
    for problem in error.problems if isinstance(error, ConfigError) else (error,):
        _say(str(error) if isinstance(error, Interrupted) else f"error: {problem}")


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
    _say(f"internal error: {summary}; this is a bug of {PROGRAM}, {where}")
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


def _say(text: object) -> None:
    with suppress(OSError, ValueError):  # stderr is closed: only the exit code remains
        say(f"{PROGRAM}: {text}")
