"""Tracebacks for users: they start with the user's first frame, and frames of libraries are summarized."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ddptrain.config.wording import counted

_PACKAGE = Path(__file__).parents[2]
_LAUNCHER_FILES = ("rank_process.py", "rank_lifecycle.py", "script.py", "entrypoint.py")
_LAUNCHER = {str(_PACKAGE / "rank" / name) for name in _LAUNCHER_FILES}
_FRAME = r'  File "[^"\n]*", line [^\n]*\n(?:    [^\n]*\n|  \[Previous line repeated[^\n]*\n)*'
_FILE = re.compile(r'  File "([^"\n]*)"')
_FRAMES = re.compile(f"(?:{_FRAME})+")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(torch|dask_pytorch_ddp)/")
_ONE_FRAME = re.compile(_FRAME)


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of the launcher, which say nothing about the fault."""
    lines = traceback.TracebackException.from_exception(error)
    dispatch = str(getattr(sys.modules.get("dask_pytorch_ddp.dispatch"), "__file__", ""))
    kept = [frame for frame in lines.stack if frame.filename not in {*_LAUNCHER, dispatch}]
    lines.stack[:] = kept or list(lines.stack)
    return "".join(lines.format())


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame that is not of the launcher."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHER:
        trace = trace.tb_next
    return trace


def users_hook() -> Callable[..., object] | None:
    """Return the sys.excepthook that the user's code has set, below those of init_process_group; None for Python's."""
    hook: Callable[..., object] = sys.excepthook
    while hook.__module__ == "torch.distributed.distributed_c10d":  # it prints "[rank0]: " before each line
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return None if hook is sys.__excepthook__ else hook


def shortened(trace: str) -> str:
    """Return the traceback with one line for each sequence of frames of torch, ddptrain or Python's import system."""
    return _FRAMES.sub(lambda match: _shorten(match[0]), trace)


def _shorten(frames: str) -> str:
    runs: list[tuple[str, list[str]]] = []
    for frame in _ONE_FRAME.findall(frames):
        library = _library(frame)
        if runs and runs[-1][0] == library:
            runs[-1][1].append(frame)
        else:
            runs.append((library, [frame]))
    return "".join(
        f"  ... {counted(len(run), 'frame')} of {library} ...\n" if library else "".join(run) for library, run in runs
    )


def _library(frame: str) -> str:
    """Return the library of a frame; "" for the user's code and the built-in workloads."""
    match = _FILE.match(frame)
    file = match[1] if match else ""
    if file.startswith("<frozen "):
        return "Python"
    if installed := _LIBRARY.search(file):
        return installed[1]
    path = Path(file)
    internal = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "workloads")
    return "ddptrain" if internal else ""


def clipped(text: str, limit: int) -> str:
    """Return the text without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... [{len(text) - limit} characters] ...\n{text[-limit // 2 :]}"
