"""Deletes a run again and again; each time the process is killed one step later. Prints what readers then see.

Usage: python kill_at_each_step.py FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from ddptrain.results.prune import PrunePolicy, prune
from ddptrain.results.runs import LocalRuns

_STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_ALL = PrunePolicy(keep=0, failed_keep=0)


def _prune_until(step: int, runs: LocalRuns) -> None:
    """Prune; the process kills itself before its change number `step`."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _STEPS or is_write:
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    prune(runs, _ALL)


def main(original: Path) -> None:
    runs = LocalRuns(original.parent / "runs")
    files = sorted(path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file())
    seen = []
    for step in range(1, 1000):
        shutil.copytree(original, runs.folder / original.name)
        child = os.fork()
        if child == 0:
            _prune_until(step, runs)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        views = runs.list()
        complete = [
            view.status == "succeeded" and all((view.layout.root / name).is_file() for name in files) for view in views
        ]
        leftover = len(os.listdir(runs.folder)) - len(views)
        prune(runs, _ALL)
        seen.append({"complete": complete, "leftover": leftover, "after": os.listdir(runs.folder)})
        if os.WIFEXITED(status):
            break
    print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "seen": seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
