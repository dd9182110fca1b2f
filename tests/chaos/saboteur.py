"""`python saboteur.py N ARGS...`: ddptrain's driver, killed at one of its file operations.

Counted are those that change the run directory once a rank's first checkpoint is being brought home.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

_COUNTED = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"})


class Saboteur:
    """An audit hook that kills the process before its `last` counted operation."""

    def __init__(self, last: int) -> None:
        self.left = last
        self.begun = False

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event not in _COUNTED or not args or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self.begun = self.begun or ".incoming-step-" in str(path)
        if not self.begun or f"{os.sep}runs{os.sep}" not in os.path.abspath(str(path)):
            return
        self.left -= 1
        if self.left == 0:
            Path("fired-driver").write_text(str(time.time_ns()))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(Saboteur(int(sys.argv[1])))
    sys.argv = [str(Path(sys.executable).with_name("ddptrain")), *sys.argv[2:]]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
