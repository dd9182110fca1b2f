"""Brings the mirrors of a model up to date: each in a process of its own, all within one time limit.

A process, because clients of servers block, log and start threads as they like: it is killed at the time limit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.retraining import MirrorSettings
from ddptrain.config.wording import shorten
from ddptrain.errors import one_line
from ddptrain.file_ops import temp_folder
from ddptrain.log import Log
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.protocol.model_mirror import MirrorRequest
from ddptrain.redact import hide_credentials, hide_known, known_secrets
from ddptrain.sanitize import sanitized

_log = Log(__name__)

_WANDB = "wandb"
_POLL_S = 0.05
_PROBLEM_CHARS = 300


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """The result of an update. notes: lines for the user. problem: why it is not up to date, in one line, or ""."""

    mirror: str
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def warning(self) -> str:
        """One line for users; "" if the mirror is up to date."""
        return f"mirror {self.mirror} is not up to date: {self.problem}" if self.problem else ""


@dataclass(frozen=True, slots=True)
class ModelMirrors:
    """The mirrors of a registry. timeout_s: seconds for all together. folders: where modules of the user are."""

    mirrors: Sequence[MirrorSettings]
    timeout_s: float = 60.0
    folders: Sequence[str] = field(default_factory=lambda: [os.getcwd()])
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @classmethod
    def of_config(cls, config: RunConfig, folders: Sequence[str]) -> ModelMirrors:
        """Return the mirrors of a configuration: those of models.mirrors, or W&B if the runs are tracked there."""
        mirrors = config.models.mirrors
        wandb = config.tracking.wandb
        if mirrors is None:
            mirrors = [MirrorSettings(name=_WANDB)] if wandb.mode != "off" else []
        of_runs = {"project": wandb.project or config.name, "entity": wandb.entity} if wandb.mode != "off" else {}
        complete = [
            each.model_copy(update={"options": {**of_runs, **each.options}}) if each.name == _WANDB else each
            for each in mirrors
        ]
        environ = {**os.environ, **config.env}  # W&B's key may be there, as for the ranks
        return cls(complete, config.models.mirror_timeout_s, folders, environ)

    def update(
        self,
        registry: ModelRegistry,
        model: str,
        *,
        reason: str = "",
        removed_alias: str = "",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[MirrorResult]:
        """Make all mirrors equal to the present state of the model, and return what became of each. Raises nothing.

        should_stop: is called often; if it returns True, the mirrors are stopped.
        """
        if not self.mirrors:
            return []
        base = MirrorRequest("", registry.where, model, reason, removed_alias, {}, self.timeout_s, self.folders)
        requests = [dataclasses.replace(base, mirror=each.name, options=each.options) for each in self.mirrors]
        deadline = time.monotonic() + self.timeout_s
        try:
            with temp_folder("ddptrain-mirror-") as scratch:
                results = self._run(requests, str(scratch), lambda: time.monotonic() > deadline or should_stop())
        except OSError as error:  # a full disk
            results = [
                MirrorResult(each.mirror, problem=f"it could not be started: {one_line(error)}") for each in requests
            ]
        for result in results:
            if result.problem:
                _log.warning("mirror not updated", mirror=result.mirror, model=model, problem=result.problem)
            else:
                _log.info("mirror updated", mirror=result.mirror, model=model, notes=list(result.notes))
        return results

    def _run(self, requests: Sequence[MirrorRequest], scratch: str, is_over: Callable[[], bool]) -> list[MirrorResult]:
        environ = without_working_directory({**self.environ, "TMPDIR": scratch})
        with ExitStack() as stack:
            running = [stack.enter_context(_process(request, environ)) for request in requests]
            while any(each.process.poll() is None for each in running) and not is_over():
                time.sleep(_POLL_S)
            return [each.result(self.environ) for each in running]


@dataclass(frozen=True, slots=True)
class _MirrorProcess:
    request: MirrorRequest
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def result(self, environ: Mapping[str, str]) -> MirrorResult:
        """Kill the process if it is running, and read what it has written."""
        code = self.process.poll()
        _kill(self.process)
        secrets = known_secrets(self.request.options, dict(environ))
        notes, problem, is_done = [], "", False
        for line in _lines(self.output):
            answer = json.loads(line)
            is_done = is_done or "problem" in answer
            problem = answer.get("problem", problem)
            if "note" in answer:
                notes.append(_safe(answer["note"], secrets))
        if not is_done:
            last = "".join(_lines(self.errors)[-1:])
            ended = f"its process ended with {code}" + (f": {last}" if last else "")
            problem = ended if code is not None else f"it was stopped, {self.request.timeout_s:g} s is the time limit"
        return MirrorResult(self.request.mirror, tuple(notes), _safe(problem, secrets))


@contextmanager
def _process(request: MirrorRequest, environ: Mapping[str, str]) -> Iterator[_MirrorProcess]:
    """Run the process that calls a mirror during the block. It ends if this process dies: its stdin closes."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", "ddptrain.model_registry.mirrors.mirror_process"]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C at a terminal would end it before it has answered
        )
        assert process.stdin is not None
        try:
            with suppress(OSError):  # it ended at once; result() has the reason
                process.stdin.write(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
                process.stdin.flush()
            yield _MirrorProcess(request, process, output, errors)
        finally:
            _kill(process)
            with suppress(OSError):
                process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it is running, with all processes that it has started."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(file: IO[bytes]) -> list[str]:
    """Return the complete lines of a process's output."""
    file.seek(0)
    text = file.read().decode("utf-8", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _safe(text: str, secrets: Sequence[str]) -> str:
    line = " ".join(sanitized(text).split())
    return shorten(hide_credentials(hide_known(line, secrets)), _PROBLEM_CHARS)
