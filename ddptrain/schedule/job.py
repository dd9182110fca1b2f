"""What a scheduler starts: the command with absolute paths, its environment, its log, and the names of its secrets."""

from __future__ import annotations

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.schedule.due_times import Schedule

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

MODELS_DIR = "DDPTRAIN_MODELS_DIR"  # the registry, in place of models.dir
_KEPT = (
    *("PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "XDG_STATE_HOME", MODELS_DIR),
    *("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
)
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN")
_TIME_TO_STOP_S = 60  # besides failure.grace_s: to save, and to upload the checkpoint


@dataclass(frozen=True, slots=True)
class Job:
    """A scheduled retraining. All paths are absolute.

    command: the program and its arguments. environment: the variables that it needs, without secrets.
    secrets: the names of the variables with secrets that it reads from `env_file`.
    jitter_s: the start is delayed by a random time of at most so many seconds. stop_s: the time it has from SIGTERM
    to its end.
    """

    name: str
    model: str
    config: Path
    workdir: Path
    schedule: Schedule
    command: tuple[str, ...]
    models_dir: str
    runs_dir: str
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    jitter_s: int = 0
    stop_s: int = _TIME_TO_STOP_S

    @property
    def title(self) -> str:
        """A description of the job in one line."""
        return f"ddptrain: retrains {self.model} ({self.schedule})"

    @property
    def env_file(self) -> Path:
        """The file with the values of `secrets`, which only this user can read."""
        return env_file(self.name)

    @property
    def log_file(self) -> Path:
        """The log, where the scheduler has none."""
        from platformdirs import user_state_path

        return user_state_path("ddptrain", appauthor=False) / "schedules" / f"{self.name}.log"


def make_job(
    resolved: ResolvedConfig, schedule: Schedule, name: str, jitter_s: float, environ: Mapping[str, str]
) -> Job:
    """Collect what the scheduler needs for the configuration, as it is used in the working directory.

    name: "" for the name of the model. Raises UsageError.
    """
    config = resolved.config
    settings = resolved.retrain
    if jitter_s and jitter_s >= (interval := schedule.shortest_interval(datetime.now(UTC)).total_seconds()):
        raise UsageError(f"--jitter is {jitter_s:g} s, and the schedule repeats after {interval:g} s: make it shorter")
    path, workdir = resolved.path.absolute(), Path.cwd()
    for place in (path, workdir):
        if re.search(r"[\x00-\x1f\x7f]", str(place)):
            raise UsageError(
                f"{shorten(str(place))} contains a line break or another control character, which a scheduler reads as "
                "the end of a setting: rename it"
            )
    kept = {key: environ[key] for key in _KEPT if environ.get(key)}
    if "PATH" in kept:
        kept["PATH"] = os.pathsep.join(dict.fromkeys(kept["PATH"].split(os.pathsep)))
    plain = {key: value for key, value in kept.items() if hide_credentials(value) == value and value.isprintable()}
    urls = [*config.notify.urls, config.notify.heartbeat or ""]
    named = {url.removeprefix(FROM_ENV) for url in urls if url.startswith(FROM_ENV)} | (kept.keys() - plain.keys())
    others = {key for key in _SECRETS if environ.get(key)}
    return Job(
        name=checked_name(name or settings.model),
        model=settings.model,
        config=path,
        workdir=workdir,
        schedule=schedule,
        command=(*_program(), "retrain", str(path), "--slot", str(schedule), "--output", "plain"),
        models_dir=config.models.dir,
        runs_dir=config.results.dir,
        environment=plain,
        secrets=tuple(sorted(named | others)),
        jitter_s=round(jitter_s),
        stop_s=round(config.failure.grace_s) + _TIME_TO_STOP_S,
    )


def checked_name(name: str) -> str:
    """Return the name of a schedule. Raises UsageError if it can't be one: it becomes the name of files."""
    if not re.fullmatch(NAME_PATTERN.rstrip("$"), name) or ".." in name:
        raise UsageError(
            f"{name!r} is not a name of a schedule: use up to 64 lower-case letters, digits, dots, dashes and "
            "underscores, without two dots in a row, beginning with a letter or digit"
        )
    return name


def env_file(name: str) -> Path:
    """Return the path of the file with the secret variables of a schedule."""
    from platformdirs import user_config_path

    return user_config_path("ddptrain", appauthor=False) / f"{name}.env"


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with lines like NAME=value, as sh and systemd read them; {} without a file.

    Raises UsageError if it can't be read, or other users may read or change it.
    """
    try:
        state = path.stat()
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    if state.st_mode & 0o077 or state.st_uid != os.geteuid():
        raise UsageError(f"{path} contains secrets, and other users may read or change it: chmod 600 {path}")
    return dict(_variables(text, path))


def _variables(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        try:
            words = shlex.split(line.removeprefix("export "))
        except ValueError as error:
            raise UsageError(f"{path}:{number} is not a line like NAME=value: {error}") from None
        if words:
            name, equals, value = words[0].partition("=")
            if not equals or len(words) > 1:
                raise UsageError(
                    f"{path}:{number} is not a line like NAME=value; put quotes around a value with blanks"
                )
            yield name, value


def _program() -> tuple[str, ...]:
    """Return the command of this installation, with its absolute path."""
    installed = Path(sysconfig.get_path("scripts"), "ddptrain")
    return (str(installed),) if os.access(installed, os.X_OK) else (sys.executable, "-m", "ddptrain")
