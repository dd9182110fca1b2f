"""Tracebacks that show the user's own frames: runs of frames of libraries become one line each."""

from __future__ import annotations

import re
from pathlib import Path

from ddptrain.config.wording import counted

_OURS = Path(__file__).parents[1]
_FRAME = r'  File "[^"\n]*", line [^\n]*\n(?:    [^\n]*\n|  \[Previous line repeated[^\n]*\n)*'
_FILE = re.compile(r'  File "([^"\n]*)"')
_FRAMES = re.compile(f"(?:{_FRAME})+")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(torch|dask_pytorch_ddp)/")
_ONE_FRAME = re.compile(_FRAME)


def folded(trace: str) -> str:
    """The traceback with each run of frames of torch, ddptrain or Python's import as one line."""
    return _FRAMES.sub(lambda found: _fold(found.group()), trace)


def _fold(frames: str) -> str:
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
    """Whose frame it is, "" for the user's own; a workload that comes along counts as the user's."""
    match = _FILE.match(frame)
    file = match[1] if match else ""
    if file.startswith("<frozen "):
        return "Python"
    if found := _LIBRARY.search(file):
        return found[1]
    path = Path(file)
    ours = path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "workloads")
    return "ddptrain" if ours else ""
