"""A scheduled retraining: what the scheduler starts, and its record in the user's state folder, a JSON file each."""

from __future__ import annotations

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from platformdirs import user_config_path, user_state_path
from pydantic import TypeAdapter, ValidationError

from ddptrain import file_ops
from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import ClusterError, UsageError
from ddptrain.redact import hide_credentials
from ddptrain.results.run_record import utc_now
from ddptrain.schedule.times import Schedule, parse_schedule

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

_KEPT = (
    *("PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "XDG_STATE_HOME", "DDPTRAIN_MODELS_DIR"),
    *("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
)
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN")
_TIME_TO_STOP_S = 60  # besides failure.grace_s: to save, and to upload the checkpoint


@dataclass(frozen=True, slots=True)
class Entry:
    """A scheduled retraining. All paths are absolute.

    at: a cron expression with its time zone. command: the program and its arguments. environment: the variables that it
    needs, without secrets. secrets: the names of the variables with secrets, whose values are in `env_file`. stop_s:
    the time from SIGTERM to the end. system: whether it is a unit of the system, not of the user. added_at: ISO 8601.
    """

    name: str
    model: str
    config: str
    workdir: str
    at: str
    target: Literal["systemd", "cron"]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    stop_s: int = _TIME_TO_STOP_S
    system: bool = False
    added_at: str = ""

    @property
    def schedule(self) -> Schedule:
        """The times."""
        return parse_schedule(self.at)

    @property
    def title(self) -> str:
        """A description in one line."""
        return f"ddptrain: retrains {self.model} ({self.at})"

    @property
    def env_file(self) -> Path:
        """The file with the values of `secrets`, which only this user can read."""
        return user_config_path("ddptrain", appauthor=False) / f"{self.name}.env"

    @property
    def log_file(self) -> Path:
        """The log, where the scheduler has none."""
        return user_state_path("ddptrain", appauthor=False) / "schedules" / f"{self.name}.log"

    def secret_values(self) -> dict[str, str]:
        """Return the variables of `env_file`, lines like NAME=value; {} without a file.

        Raises UsageError if it can't be read, or other users may read or change it.
        """
        try:
            state = self.env_file.stat()
            text = self.env_file.read_text(encoding="utf-8")
            words = shlex.split(text, comments=True)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.env_file} can't be read: {error}") from None
        if state.st_mode & 0o077 or state.st_uid != os.geteuid():
            raise UsageError(f"{self.env_file} contains secrets, and others may read or change it: chmod 600 it")
        return dict(word.split("=", 1) for word in words if "=" in word)


_ADAPTER = TypeAdapter(Entry)


def make_entry(
    resolved: ResolvedConfig,
    schedule: Schedule,
    target: Literal["systemd", "cron"],
    name: str,
    environ: Mapping[str, str],
    *,
    system: bool = False,
) -> Entry:
    """Collect what the scheduler needs for the configuration, as it is used in the working directory.

    name: "" for the name of the model. Raises UsageError.
    """
    config, settings = resolved.config, resolved.retrain
    path, workdir = resolved.path.absolute(), Path.cwd()
    for place in (path, workdir):
        if re.search(r"[\x00-\x1f\x7f]", str(place)):
            raise UsageError(
                f"{shorten(str(place))} contains a line break or another control character, which a scheduler reads as "
                "the end of a setting: rename it"
            )
    name = name or settings.model
    if not re.fullmatch(NAME_PATTERN.rstrip("$"), name) or ".." in name:
        raise UsageError(
            f"{name!r} is not a name of a schedule: use up to 64 lower-case letters, digits, dots, dashes and "
            "underscores, without two dots in a row, beginning with a letter or digit"
        )
    kept = {key: environ[key] for key in _KEPT if environ.get(key)}
    plain = {key: value for key, value in kept.items() if hide_credentials(value) == value and value.isprintable()}
    urls = [*config.notify.urls, config.notify.heartbeat or ""]
    named = {url.removeprefix(FROM_ENV) for url in urls if url.startswith(FROM_ENV)} | (kept.keys() - plain.keys())
    installed = Path(sysconfig.get_path("scripts"), "ddptrain")
    program = (str(installed),) if os.access(installed, os.X_OK) else (sys.executable, "-m", "ddptrain")
    return Entry(
        name=name,
        model=settings.model,
        config=str(path),
        workdir=str(workdir),
        at=str(schedule),
        target=target,
        command=(*program, "retrain", str(path), "--slot", str(schedule), "--output", "plain"),
        environment=plain,
        secrets=tuple(sorted(named | {key for key in _SECRETS if environ.get(key)})),
        stop_s=round(config.failure.grace_s) + _TIME_TO_STOP_S,
        system=system,
        added_at=utc_now(),
    )


class Entries:
    """The installed schedules. All methods raise ClusterError if the folder can't be read or written."""

    def __init__(self) -> None:
        self.folder = user_state_path("ddptrain", appauthor=False) / "schedules"

    def readable(self) -> tuple[list[Entry], list[str]]:
        """Return the schedules whose files are not damaged, by name, and a line for each file that is."""
        entries, problems = [], []
        with self._errors():
            for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []:
                try:
                    entries.append(_ADAPTER.validate_json(path.read_bytes()))
                    _ = entries[-1].schedule
                except (ValidationError, UsageError):
                    problems.append(f"{path} is damaged: delete it, and add the schedule again")
        return entries, problems

    def get(self, name: str) -> Entry | None:
        """Return the schedule of this name, if there is one. Raises UsageError if a file is damaged."""
        entries, problems = self.readable()
        if problems:
            raise UsageError(problems[0])
        return next((entry for entry in entries if entry.name == name), None)

    def find(self, name: str) -> Entry:
        """Return a schedule. Raises UsageError if there is none of this name, or a file is damaged."""
        entry = self.get(name)
        if entry is None:
            known = [each.name for each in self.readable()[0]]
            hint = did_you_mean(name, known) or "none is installed; ddptrain schedule add CONFIG --at TIME --install"
            raise UsageError(f"there is no schedule {name}: {hint}")
        return entry

    def save(self, entry: Entry) -> None:
        """Write a schedule, or replace the one of this name."""
        with self._errors():
            file_ops.make_private(self.folder)
            file_ops.write_atomic(self.folder / f"{entry.name}.json", _ADAPTER.dump_json(entry, indent=1), mode=0o600)

    def delete(self, name: str) -> None:
        """Delete the record of a schedule."""
        with self._errors():
            (self.folder / f"{name}.json").unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder for the block: one command at a time changes or checks schedules."""
        with self._errors():
            file_ops.make_private(self.folder)
            descriptor = file_ops.open_regular(self.folder / "schedules.lock", file_ops.CREATE)
        try:
            with self._errors():
                file_ops.wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClusterError(
                f"cannot use the folder {self.folder}: {error.strerror or error}; set XDG_STATE_HOME to another"
            ) from error
