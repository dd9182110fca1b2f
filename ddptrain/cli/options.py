"""The arguments and options that several commands share; those for fields are checked like the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ddptrain.cli import complete
from ddptrain.cli.parser import MORE, OPTIONAL_NUMBER
from ddptrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ddptrain.protocol.rank_spec import Debug
    from ddptrain.results.run import Run as FoundRun
    from ddptrain.results.runs import Runs as Runs

Loaded = TypeVar("Loaded")
DEFAULT_RUNS_DIR = "runs"


class OutputMode(StrEnum):
    """How `train` and `run` show what happens."""

    AUTO = "auto"
    LIVE = "live"
    PLAIN = "plain"
    JSON = "json"


_RUN = typer.Argument(
    metavar="RUN",
    autocompletion=complete.runs,
    help="A run's id, the start of one, latest, a directory, or a URL.",
)
Run = Annotated[str, _RUN]
OptionalRun = Annotated[str | None, _RUN]
RunNames = Annotated[list[str], _RUN]
RunOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        autocompletion=complete.runs_or_models,
        help="A run's id, the start of one, latest, a directory or URL; or a model, as NAME@champion.",
    ),
]
Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        autocompletion=complete.configurations,
        help="YAML file, or the name of a shipped example, as petnames.",
    ),
]
RanksOption = Annotated[int | None, typer.Option(help="Training processes (cluster.ranks).")]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=complete.clusters,
        help="A cluster that is up: its name, address or scheduler file.",
    ),
]
WaitOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Wait for slots that others hold, as 2h (cluster.wait_s).",
    ),
]
RunsDirOption = Annotated[
    str | None,
    typer.Option(
        "--runs-dir",
        metavar="DIR|URL",
        # Not show_default: the default of this parameter is None.
        help="Folder of the run directories, or s3://bucket/folder (results.dir).  [default: runs]",
    ),
]
ModelsDirOption = Annotated[
    str | None,
    typer.Option(
        "--models-dir",
        metavar="DIR|URL",
        envvar="DDPTRAIN_MODELS_DIR",
        show_envvar=False,
        help="Folder of the model registry, or s3://bucket/folder (models.dir); also DDPTRAIN_MODELS_DIR.  "
        "[default: models]",
    ),
]
RunIdOption = Annotated[
    str | None, typer.Option(rich_help_panel=MORE, help="Name of the run directory; by default one is made.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|auto",
        autocompletion=complete.runs,
        help="Continue a run; auto: the newest of this name that did not succeed, or the one of --run-id.",
    ),
]
AllowChangesOption = Annotated[
    bool,
    typer.Option(
        "--allow-changes",
        rich_help_panel=MORE,
        help="Resume although workload or parameters have changed.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check configuration and cluster, and start nothing.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return when the run has begun; it continues.")]
SubmitOption = Annotated[
    bool,
    typer.Option(
        "--submit", help="Return when the run is in the queue of Slurm or Kubernetes, whose job runs it to its end."
    ),
]
AllRanksOption = Annotated[
    bool,
    typer.Option(
        "--all-ranks",
        rich_help_panel=MORE,
        help="Show all lines of all ranks; by default, from 17 ranks on, those of rank 0 and what differs.",
    ),
]
ReportOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=MORE,
        help="Write a report at the end, also of a failure: FILE.md for pull requests, FILE.xml for JUnit; repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
OutputOption = Annotated[
    OutputMode,
    typer.Option(
        metavar="MODE",
        show_default=False,
        rich_help_panel=MORE,
        help="auto, live, plain or json; auto is live on a terminal, and plain lines elsewhere.",
    ),
]
DebugOption = Annotated[
    int | None,
    typer.Option(
        "--debug",
        metavar=OPTIONAL_NUMBER,
        help="Debug a rank with pdb in this terminal; by default 0.",
    ),
]
ListenOption = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        rich_help_panel=MORE,
        help="With --debug: an editor connects there (debugpy).",
    ),
]
ReadyOption = Annotated[bool, typer.Option("--ready", hidden=True)]


@dataclass
class Places:
    """The options --runs-dir and --models-dir, which are the same for all commands."""

    runs_dir: str | None = None
    models_dir: str | None = None

    @property
    def runs(self) -> str:
        """The folder of the run directories."""
        return self.runs_dir or DEFAULT_RUNS_DIR

    @property
    def models(self) -> str:
        """The folder of the model registry."""
        return self.models_dir or "models"


PLACES = Places()  # of this process, which runs one command


def wants_full_traceback() -> bool:
    """Return whether tracebacks are shown with the frames of torch and ddptrain: with --verbose."""
    return os.environ.get("DDPTRAIN_LOG") == "debug"


def log_to_stderr(wanted: bool) -> None:
    """Write ddptrain's own log to stderr if it is `wanted`, or DDPTRAIN_LOG says so. Raises UsageError."""
    if wanted:
        os.environ["DDPTRAIN_LOG"] = "debug"  # in the environment: for the processes that this one starts, too
    if os.environ.get("DDPTRAIN_LOG"):
        from ddptrain import log

        log.to_stderr()


VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose",
        callback=log_to_stderr,
        is_eager=True,
        expose_value=False,
        rich_help_panel=MORE,
        help="Log on stderr what ddptrain decides, and show all frames of tracebacks; also DDPTRAIN_LOG=debug.",
    ),
]


def debug_rank(rank: int | None, listen: str | None, output: str, unfit: str = "") -> Debug | None:
    """Return what --debug and --listen ask for. `unfit`: an option that leaves no terminal. Raises UsageError."""
    from ddptrain.driver.control.debugger import check_input
    from ddptrain.protocol.rank_spec import Debug

    if rank is not None and rank < 0:
        raise UsageError(f"--debug {rank}: expected the number of a rank, from 0")
    if listen is not None:
        host, _, port = listen.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"--listen {listen}: expected a port, as 5678, or HOST:PORT")
        return Debug(rank or 0, int(port), host.strip("[]") or "127.0.0.1")
    if rank is None:
        return None
    if unfit := unfit or ("--output json" if output == "json" else ""):
        raise UsageError(f"--debug connects this terminal to the debugger: leave {unfit} out, or give --listen PORT")
    check_input()
    return Debug(rank)


def set_option(example: str) -> Any:
    """Return the option --set; its help has an example."""
    return typer.Option("--set", metavar="KEY=VALUE", help=f"Change a field, as --set {example}; repeatable.")


def checked(load: Callable[[Sequence[str]], Loaded], overrides: Sequence[str], options: Mapping[str, str]) -> Loaded:
    """Call `load` with the texts of --set and of `options` (`--set` text -> the option as it was typed).

    Raises ConfigError; its problems name the option as it was typed.
    """
    try:
        return load([*overrides, *options])
    except ConfigError as error:
        typed = {f"--set {text}": option for text, option in options.items()}
        problems = [replace(problem, where=typed.get(problem.where, problem.where)) for problem in error.problems]
        raise ConfigError(problems) from None


def parsed(option: str, text: str, parse: Callable[[str], Loaded]) -> Loaded:
    """Return the value of an option. Raises UsageError, which names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def local_config(config: str) -> str:
    """Return the file that CONFIG names; one of an object store is downloaded. Raises UsageError, StoreError."""
    if "://" not in config:
        return config
    from ddptrain.results.runs import fetch_config

    return str(fetch_config(config))


def field_options(
    ranks: int | None, cluster: str | None, runs_dir: str | None = None, wait: str | None = None
) -> dict[str, str]:
    """Convert options for configuration fields: `--set` text -> the option as it was typed."""
    options: dict[str, str] = {}
    if ranks is not None:
        options[f"cluster.ranks={ranks}"] = f"--ranks {ranks}"
    if cluster is not None:
        options |= dict.fromkeys(_cluster_fields(cluster), f"--cluster {cluster}")
    if wait is not None:
        options[f"cluster.wait_s={wait}"] = f"--wait {wait}"
    if runs_dir is not None:
        options[f"results.dir={json.dumps(runs_dir)}"] = f"--runs-dir {runs_dir}"
    return options


def _cluster_fields(cluster: str) -> list[str]:
    """Return the overrides for `--cluster`, whose value is a name, an address (with a port) or a scheduler file."""
    import re

    from ddptrain.config.sections.clusters import BACKEND_FIELDS
    from ddptrain.config.types import is_scheduler_file

    if not is_scheduler_file(cluster) and not re.fullmatch(r"[^/]+:\d+|\w+://.*", cluster):
        return [f"cluster.name={json.dumps(cluster)}"]
    cleared = [f"cluster.{other}=null" for other in ("name", *BACKEND_FIELDS) if other != "address"]
    return [*cleared, "cluster.kwargs={}", "cluster.backend=address", f"cluster.address={json.dumps(cluster)}"]


def place_of(run: str) -> tuple[Runs, str]:
    """Return the runs folder to search, and the name of the run."""
    from ddptrain.results.runs import open_runs_dir, split_run

    place, name = split_run(run, PLACES.runs)
    return open_runs_dir(place), name


def view_of(run: str) -> FoundRun:
    """Return the run of that name. Raises RunNotFound."""
    runs, name = place_of(run)
    return runs.find(name)
