"""Runs from Python: `ddptrain.launch` for notebooks and schedulers.

The driver is a separate process, the same as for `ddptrain train`: it uses no signal handler, event loop or thread of
the caller. Both share only the run directory.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ddptrain.errors import ConfigError, UsageError
from ddptrain.run_handle import STOP_TIMEOUT_S, Run, error_of

if TYPE_CHECKING:
    import torch

__all__ = ["Run", "launch", "load_model"]

_POLL_S = 0.1
Output = Literal["auto", "plain", "json", "none"]


def launch(
    config: str | os.PathLike[str] | Mapping[str, Any] | Callable[..., Any],
    *,
    params: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    ranks: int | None = None,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    resume: str | None = None,
    allow_changes: bool = False,
    wait: bool = True,
    output: Output = "auto",
) -> Run:
    """Train with a YAML file, its content, or a function of a module; return the run.

    `params` are those of the workload, `overrides` any fields ({"checkpoint.keep": 5}, or texts as for --set); `ranks`
    to `allow_changes` are the options of `ddptrain train`. With `wait` the call shows the output of the run and returns
    when the run has succeeded; an exception such as Ctrl-C stops the run. `output` is plain (lines), json (lines),
    none, or auto: in Jupyter a table that is updated in place, plain elsewhere. Without `wait` the call returns when
    the run has begun; the run then continues without this process. Any thread may call `launch`.

    Raises:
        UsageError, ConfigError: nothing was started.
        TrainingFailed, HangDetected, ClusterError, RunLocked, RunPreempted, Interrupted: with `wait`, the run failed.
    """
    from ddptrain.driver.control.detach import EndedEarly, LaunchRequest, start_ordered
    from ddptrain.results.log_tail import LogTail
    from ddptrain.results.show.live_table import in_notebook

    if "DDPTRAIN_RUN_ID" in os.environ and "RANK" in os.environ:
        raise UsageError(
            "launch was called in a rank, which has imported this module for its function: "
            'put the call under if __name__ == "__main__":'
        )
    if output not in get_args(Output):
        raise UsageError(f"output is {', '.join(get_args(Output)[:-1])} or none, not {output!r}")
    path, data, folder = _config_source(config)
    changes = _override_texts(params, overrides)
    _check_config(path, data, folder, changes)
    options = {"ranks": ranks, "cluster": cluster, "runs-dir": runs_dir, "run-id": run_id, "resume": resume}
    arguments = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    arguments += ["--allow-changes"] if allow_changes else []
    arguments += ["--output", "json" if output == "json" else "plain"]
    request = LaunchRequest(data, str(folder), changes, wait)
    process, begun = start_ordered(["train", "--ordered", *arguments, "--", path], request.to_line())
    if isinstance(begun, EndedEarly):
        raise error_of(begun.exit_code, _last_error(begun.output))
    run = Run(begun.run_id, begun.run_dir, process)
    try:
        if wait:
            write = partial(print, flush=True) if output != "none" else lambda _: None
            log = LogTail(run._folder / "driver.log", offset=begun.log_from)  # noqa: SLF001  # not for users
            show = partial(run._show, log.texts, write, _POLL_S)  # noqa: SLF001
            try:
                show(live=output == "auto" and in_notebook())
            except BaseException:
                if process.poll() is None:
                    _stop_driver(process)
                    with suppress(Exception):  # the first exception is raised
                        show()
                raise
    finally:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()  # the driver goes on without this process
    return run


def load_model(reference: str, models_dir: str | os.PathLike[str] = "models") -> torch.nn.Module:
    """Load a model of the registry, such as "petnames@champion", on the CPU and in eval mode.

    All files are compared with their hashes first; no pickle is executed. models_dir: a folder, or s3://bucket/folder.

    Raises:
        UsageError: there is no such version, or its workload is not built in.
        DdptrainError: a file is damaged, which the message names, or the registry cannot be read.
    """
    from ddptrain.model_registry.reference import parse_reference
    from ddptrain.model_registry.registry import ModelRegistry, open_version
    from ddptrain.workloads.checkpoint import load_trained

    registry = ModelRegistry.open(os.fspath(models_dir))
    record = registry.resolve(parse_reference(reference))
    return load_trained(open_version(registry, record), record.workload)


def _config_source(config: Any) -> tuple[str, Mapping[str, Any] | None, Path]:
    """Return the path of the YAML file ("-" for data), the data, and the folder for relative paths in the data."""
    if isinstance(config, str | os.PathLike):
        return os.fspath(config), None, Path.cwd()
    if isinstance(config, Mapping):
        return "-", json.loads(_json(config, "the configuration")), Path.cwd()
    if callable(config):
        workload, folder = _workload(config)
        return "-", {"workload": workload}, folder
    raise UsageError(f"launch takes a path, a dict or a function, not {config!r}")


def _workload(function: Callable[..., Any]) -> tuple[str, Path]:
    """Return the function as package.module:function, and the folder that contains the package.

    Raises UsageError if ranks cannot import the function.
    """
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or not name or "<" in name:
        raise UsageError(
            f"{function!r} is not a function of a module, which ranks could import: define it at its top level"
        )
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if module_name == "__main__":
        module_name = spec.name if spec is not None else Path(file or "").stem
    if file is None or not all(part.isidentifier() for part in str(module_name).split(".")):
        raise UsageError(
            f"the function {name} is defined in {file or 'a notebook or a shell'}, which ranks can't import: put it "
            "into a module, as with %%writefile train.py, and launch train.py's function"
        )
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if attribute is not function:
        raise UsageError(
            f"{module_name}.{name} is not the function that was passed to launch: pass {module_name}.{name}, "
            "which ranks can import"
        )
    depth = str(module_name).count(".") + (Path(file).name == "__init__.py")
    folder = Path(file).resolve().parents[depth]
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return f"{module_name}:{name}", Path.cwd() if installed else folder


def _override_texts(params: Mapping[str, Any] | None, overrides: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    if isinstance(overrides, str):
        raise UsageError(f"overrides is a dict, or a list of texts such as params.epochs=3, not {overrides!r}")
    if params is not None and not isinstance(params, Mapping):
        raise UsageError(f"params is a dict, not {params!r}")
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
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _check_config(path: str, data: Mapping[str, Any] | None, folder: Path, changes: Sequence[str]) -> None:
    """Raise ConfigError with a list of its problems; the driver's process could only return them as text."""
    from ddptrain.config.load import load_config, load_mapping

    try:
        if data is None:
            load_config(path, changes)
        else:
            load_mapping(data, folder, changes)
    except ConfigError as error:
        problems = [dataclasses.replace(it, where=it.where.removeprefix("--set ")) for it in error.problems]
        raise ConfigError(problems) from None


def _stop_driver(process: subprocess.Popen[bytes]) -> None:
    """Stop the driver as Ctrl-C does; a second Ctrl-C stops it at once."""
    number = signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT
    deadline = time.monotonic() + STOP_TIMEOUT_S
    process.send_signal(number)
    while process.poll() is None and time.monotonic() < deadline:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            process.send_signal(number)


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ddptrain: ").removeprefix("error: ") for line in lines if line.startswith("ddptrain:")]
    return "\n".join(errors or lines[-5:]) or "the driver ended without any output"
