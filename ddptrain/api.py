"""Runs from Python: `ddptrain.launch` for notebooks and schedulers, and `ddptrain.Run`, a run that is on or was.

The driver is a process of its own, the same as `ddptrain train` starts: it takes no signal handler, event loop or
thread of the caller's, and its run directory is all that the two share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ddptrain.errors import (
    ClusterError,
    ConfigError,
    DdptrainError,
    ExitCode,
    HangDetected,
    Interrupted,
    RunLocked,
    RunPreempted,
    TrainingFailed,
    UsageError,
)

if TYPE_CHECKING:
    from ddptrain.config import RunConfig
    from ddptrain.driver.stopping import Going
    from ddptrain.results.find import RunView
    from ddptrain.results.record import FailureRecord

Output = Literal["auto", "plain", "json", "none"]

_LOOK_S = 0.1
_STORE_LOOK_S = 2.0
_ENDING_S = 120.0  # for a driver that was told to end: grace, and what it brings home
_ERRORS: dict[int, type[DdptrainError]] = {
    ExitCode.TRAINING_FAILED: TrainingFailed,
    ExitCode.USAGE: UsageError,
    ExitCode.CLUSTER: ClusterError,
    ExitCode.HANG: HangDetected,
    ExitCode.LOCKED: RunLocked,
    ExitCode.PREEMPTED: RunPreempted,
}


def launch(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig | Callable[..., Any],
    *,
    params: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    ranks: int | None = None,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    resume: str | None = None,
    wait: bool = True,
    output: Output = "auto",
) -> Run:
    """Train what a YAML file, its content, or a function of a module describes; return the run.

    `params` are the workload's own, `overrides` any fields ({"checkpoint.keep": 5}, or texts as --set takes them);
    `ranks`, `cluster`, `runs_dir`, `run_id` and `resume` are the options of `ddptrain train`. With `wait` the call
    returns once the run has succeeded, prints what happens (`output`: plain lines, JSON lines or none), and an
    exception such as Ctrl-C stops the run; without it returns once the run has begun, which goes on even without
    this process. It may be called in any thread.

    Raises:
        UsageError, ConfigError: nothing was started.
        TrainingFailed, HangDetected, ClusterError, RunLocked, RunPreempted, Interrupted: with `wait`, how it ended.
    """
    if "DDPTRAIN_RUN_ID" in os.environ and "RANK" in os.environ:
        raise UsageError(
            "launch was called in a rank, which has imported this module for its function: "
            'put the call under if __name__ == "__main__":'
        )
    path, data, folder = _described(config)
    changes = _changes(params, overrides)
    _check(path, data, folder, changes)
    options = {"ranks": ranks, "cluster": cluster, "runs-dir": runs_dir, "run-id": run_id, "resume": resume}
    arguments = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    run = _started(path, data, folder, changes, [*arguments, "--output", "json" if output == "json" else "plain"], wait)
    if wait:
        run._attend(sys.stdout.write if output != "none" else lambda _: None)  # noqa: SLF001  # its own module
    return run


def _described(config: Any) -> tuple[str, Mapping[str, Any] | None, Path]:
    """A path, or else data and the folder in which it is as if it stood."""
    from pydantic import BaseModel

    if isinstance(config, str | os.PathLike):
        return os.fspath(config), None, Path.cwd()
    if isinstance(config, BaseModel):
        return "-", config.model_dump(mode="json", exclude_unset=True, by_alias=True), Path.cwd()
    if isinstance(config, Mapping):
        return "-", json.loads(_json(config, "the configuration")), Path.cwd()
    if callable(config):
        workload, folder = _workload(config)
        return "-", {"workload": workload}, folder
    raise UsageError(f"launch takes a path, a dict, a RunConfig or a function, not {config!r}")


def _workload(function: Callable[..., Any]) -> tuple[str, Path]:
    """A function as package.module:function, and the folder in which that package is found. Raises UsageError."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or not name or "<" in name:
        raise UsageError(f"{function!r} is no function of a module, which ranks could import: define it at its top level")
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if module_name == "__main__":
        module_name = spec.name if spec is not None else Path(file or "").stem
    if file is None or not all(part.isidentifier() for part in str(module_name).split(".")):
        raise UsageError(
            f"the function {name} is of {file or 'a notebook or a shell'}, which ranks can't import: put it into a "
            "module, as with %%writefile train.py, and launch train.py's function"
        )
    if not (_is_same(module, name, function)):
        raise UsageError(f"{module_name} has another {name} than this one: launch the one that ranks can import")
    depth = str(module_name).count(".") + (Path(file).name == "__init__.py")
    folder = Path(file).resolve().parents[depth]
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return f"{module_name}:{name}", Path.cwd() if installed else folder


def _is_same(module: Any, name: str, function: Callable[..., Any]) -> bool:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _changes(params: Mapping[str, Any] | None, overrides: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    if isinstance(overrides, str):
        raise UsageError(f"overrides is a dict, or a list of texts such as params.epochs=3, not {overrides!r}")
    texts = [] if overrides is None or isinstance(overrides, Mapping) else list(overrides)
    fields = dict(overrides) if isinstance(overrides, Mapping) else {}
    fields |= {f"params.{name}": value for name, value in (params or {}).items()}
    return [*texts, *(f"{key}={_json(value, key)}" for key, value in fields.items())]


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} has to be plain data (numbers, text, lists, dicts): {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a number of numpy's
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _check(path: str, data: Mapping[str, Any] | None, folder: Path, changes: Sequence[str]) -> None:
    """Raise ConfigError here, where it has its problems, and not as a text of another process."""
    from ddptrain.configfile import load_config, load_mapping

    try:
        if data is None:
            load_config(path, changes)
        else:
            load_mapping(data, folder, changes)
    except ConfigError as error:
        named = [dataclasses.replace(it, where=it.where.removeprefix("--set ")) for it in error.problems]
        raise ConfigError(named) from None


def _started(
    path: str,
    data: Mapping[str, Any] | None,
    folder: Path,
    changes: Sequence[str],
    arguments: Sequence[str],
    together: bool,
) -> Run:
    from ddptrain.driver.detach import EndedEarly, start_ordered
    from ddptrain.driver.order import Order

    order = Order(data, str(folder), changes, together)
    process, begun = start_ordered(["train", "--ordered", *arguments, "--", path], order.to_line())
    if isinstance(begun, EndedEarly):
        raise _error(begun.exit_code, _last_error(begun.said))
    run = Run(begun.run_id, begun.run_dir, process, begun.log_from)
    if not together:
        run._let_go()  # noqa: SLF001  # its own module
    return run


def _last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ddptrain: ").removeprefix("error: ") for line in lines if line.startswith("ddptrain:")]
    return "\n".join(errors or lines[-5:]) or "the driver ended without a word"


def _error(exit_code: int, cause: str) -> DdptrainError:
    if exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        return Interrupted(exit_code - 128)
    if exit_code < 0:
        return ClusterError(f"the driver was killed by {signal.Signals(-exit_code).name}")
    return _ERRORS.get(exit_code, DdptrainError)(cause)


class Run:
    """A run: what it is about is read anew each time it is asked for."""

    def __init__(
        self, run_id: str, run_dir: str, process: subprocess.Popen[bytes] | None = None, log_from: int = 0
    ) -> None:
        """Runs come from `launch` or `find`. `run_dir` is a folder or, of a run in an object store, its address."""
        from ddptrain.results.remote import StoreRuns, open_runs_dir

        self.id = run_id
        self.where = run_dir
        self._process = process
        self._log_from = log_from
        place = run_dir.rstrip("/").rpartition("/")[0] if "://" in run_dir else str(Path(run_dir).parent)
        self._runs = open_runs_dir(place)
        self._is_stored = isinstance(self._runs, StoreRuns)
        self._desk = self._runs.work / run_id if isinstance(self._runs, StoreRuns) else Path(run_dir).absolute()

    @classmethod
    def find(cls, run: str = "latest", runs_dir: str | os.PathLike[str] = "runs") -> Self:
        """A run that is there: by its id, the start of one, `latest`, or its directory. Raises RunNotFound."""
        from ddptrain.results.remote import open_runs_dir, split_run

        place, name = split_run(run, os.fspath(runs_dir))
        view = open_runs_dir(place).find(name)
        return cls(view.run_id, view.layout.where)

    def __repr__(self) -> str:
        return f"<ddptrain.Run {self.id}: {self.status}>"

    # --- what it is ---

    @property
    def dir(self) -> Path:
        """The run directory; of a run in an object store, a copy of what was asked for."""
        return self._view().layout.root

    @property
    def status(self) -> str:
        """running, succeeded, failed, preempted or cancelled; unknown, where its driver on another host is silent."""
        return str(self._view().status)

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None while the run is on."""
        return self._view().record.exit_code

    @property
    def failure(self) -> FailureRecord | None:
        """What failed first: .rank, .host, .type, .message, .traceback, .log; None where nothing has."""
        return self._view().record.failure

    @property
    def result(self) -> Any:
        """What the function returned on rank 0, as JSON data; None while there is nothing."""
        return json.loads((self.dir / "run.json").read_bytes()).get("result")

    def metrics(self) -> list[dict[str, Any]]:
        """Every line that was logged: {"time_s", "step", "epoch", "rank", name: number, ...}, as pandas takes them."""
        from ddptrain.results.metrics import MetricsReader
        from ddptrain.results.runsdir import Need

        lines = MetricsReader(self._view(Need.METRICS).layout.metrics_jsonl).read()
        return [
            {"time_s": it.time_s, "step": _whole(it.step), "epoch": it.epoch, "rank": it.rank, **it.values} for it in lines
        ]

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of its checkpoints, the newest first."""
        from ddptrain.results.checkpoints import MANIFEST
        from ddptrain.results.layout import step_of

        folder = self.dir / "checkpoints"
        there = list(folder.iterdir()) if folder.is_dir() else []
        steps = {path: step for path in there if (step := step_of(path.name)) is not None and (path / MANIFEST).is_file()}
        return sorted(steps, key=lambda path: -steps[path])

    @property
    def best(self) -> Path | None:
        """The folder of the best checkpoint (the newest, where no metric decides); None where there is none."""
        from ddptrain.errors import RunNotFound
        from ddptrain.results.find import find_checkpoint
        from ddptrain.results.runsdir import Need

        try:
            return find_checkpoint(self._view(Need.MODEL).layout, "best")
        except RunNotFound:
            return None

    def logs(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        from ddptrain.results.runsdir import Need

        log = self._view(Need.LOGS, rank).layout.log(rank)
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    # --- what can be done with it ---

    def wait(self, timeout_s: float | None = None) -> Self:
        """Return once it has succeeded; an exception meanwhile leaves it alone.

        Raises:
            TimeoutError: it is still on after `timeout_s`.
            TrainingFailed, HangDetected, ClusterError, RunPreempted, Interrupted: how else it has ended.
        """
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self._is_on():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"run {self.id} is still on after {timeout_s:g} s")
            time.sleep(min(left_s, _STORE_LOOK_S if self._is_stored and self._process is None else _LOOK_S))
        self._raise()
        return self

    def stop(self, *, now: bool = False) -> Self:
        """End it: its ranks finish their step and save, unless `now`; return once it has ended.

        Raises: ClusterError where it goes on although its time is over.
        """
        from ddptrain.driver.stopping import stop_run

        stop_run(self._going(), now=now, by="ddptrain.Run.stop", tell=lambda _: None)
        if self._process is not None:
            self._process.wait(_ENDING_S)
        return self

    # --- how that is done ---

    def _view(self, *need: Any) -> RunView:
        from ddptrain.results.find import load_run

        if not self._is_stored:
            return load_run(self._desk)
        return self._runs.find(self.id, *need)

    def _going(self) -> Going:
        from ddptrain.driver.stopping import Going
        from ddptrain.results.layout import RunLayout

        if not self._is_stored:
            return Going(RunLayout(self._desk), self._view)
        return Going(RunLayout(self._desk), self._view, look_every_s=_STORE_LOOK_S)

    def _is_on(self) -> bool:
        from ddptrain.driver.stopping import is_going

        if self._process is not None:
            return self._process.poll() is None
        return is_going(self._view())

    def _raise(self) -> None:
        """Nothing, where it has succeeded."""
        record = self._view().record
        code = self._process.returncode if self._process is not None else record.exit_code
        if code == ExitCode.SUCCEEDED:
            return
        failure = record.failure
        if failure is None:
            raise _error(ExitCode.CLUSTER if code is None else code, f"run {self.id} ended with exit code {code}")
        words = [word for word in (failure.type, failure.message.partition("\n")[0]) if word]
        place = f"rank {failure.rank} on {failure.host}: " if failure.rank is not None else ""
        log = f"; log: {failure.log}" if failure.log else ""
        again = f"; go on with resume={self.id!r}" if code == ExitCode.PREEMPTED else ""
        raise _error(ExitCode.CLUSTER if code is None else code, f"run {self.id}: {place}{': '.join(words)}{log}{again}")

    def _let_go(self) -> None:
        """The driver is to go on without this process."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _attend(self, say: Callable[[str], object]) -> None:
        """Pass on what the driver says until it has ended; an exception stops the run. Raises how it ended."""
        said = _Said(self._desk / "driver.log", say, self._log_from)
        try:
            while self._is_on():
                said.pass_on()
                time.sleep(_LOOK_S)
        except BaseException:
            self._end()
            with suppress(Exception):
                said.pass_on()
            raise
        finally:
            self._let_go()
        said.pass_on()
        self._raise()

    def _end(self) -> None:
        """Have the driver end, as Ctrl-C does; a second Ctrl-C ends it at once."""
        process = self._process
        if process is None:
            return
        number = signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT
        deadline = time.monotonic() + _ENDING_S
        process.send_signal(number)
        while process.poll() is None and time.monotonic() < deadline:
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                process.send_signal(number)


def _whole(step: float | None) -> float | None:
    return int(step) if step is not None and step.is_integer() else step


class _Said:
    """What a driver has printed, line by line."""

    def __init__(self, log: Path, say: Callable[[str], object], offset: int = 0) -> None:
        self._log, self._say, self._offset = log, say, offset

    def pass_on(self) -> None:
        """Say the whole lines that have come."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        if whole:
            self._say(whole.decode("utf-8", "replace"))
