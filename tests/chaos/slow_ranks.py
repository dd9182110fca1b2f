"""Runs with a rank that a CPU hog slows down, and runs without one: is the right rank named, and no rank without a hog?

    python -m tests.chaos.slow_ranks --runs 20

In a run with a hog each rank is bound to a core of its own, and the hog to the core of one of them, of which it takes
half. Other processes of a busy machine would move to the other core, and slow the wrong rank down. So ranks and hog get
the highest priority, if they may have that; other processes hardly run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

STEPS = 300
_TRAIN = """
import contextlib, os
import torch
from torch import nn

def main(ctx, steps: int, cores: list[int]):
    if cores:
        os.sched_setaffinity(0, {cores[ctx.rank]})
    with contextlib.suppress(OSError):
        os.nice(-20)
        open("/proc/self/autogroup", "w").write("-20")
    torch.set_num_threads(1)
    model = ctx.prepare(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)], nn.Linear(512, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(128, 512)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        ctx.progress(step, steps, unit="steps")
"""


def slow_rank_events(folder: Path, cores: list[int], hogged: int | None = None) -> list[dict[str, Any]]:
    """Train with two ranks; return the events of slow ranks. The run ends with the first of them.

    A hog is on the core `hogged` from the first step until the end of the run.
    """
    (folder / "hogged.py").write_text(_TRAIN)
    config = {
        "workload": "hogged:main",
        "params": {"steps": STEPS, "cores": cores},
        "cluster": {"ranks": 2},
        "checkpoint": {"metric": None},
        "system": {"every_s": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML, too
    command = [sys.executable, "-m", "ddptrain", "train", "run.yaml", "--output", "json"]
    found = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as run, ExitStack() as stack:
        assert run.stdout is not None
        for line in run.stdout:
            event = json.loads(line)
            if event["event"] == "entered" and event["rank"] == 1 and hogged is not None:
                stack.enter_context(hog(hogged))
            if event["event"] == "slow_rank":
                found.append(event)
                run.terminate()
            if event["event"] in ("slow_rank", "run_finished"):
                stack.close()
            if event["event"] == "run_finished" and not found and event["exit_code"] != 0:
                raise RuntimeError(f"the run has failed: {event['failure']}")
    if run.returncode != 0 and not found:
        raise RuntimeError(f"the command has failed with exit code {run.returncode}")
    return found


_HOG = """
import contextlib, os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
with contextlib.suppress(OSError):
    os.nice(-20)
    open("/proc/self/autogroup", "w").write("-20")
while os.getppid() == int(sys.argv[2]):
    pass
"""


@contextmanager
def hog(core: int) -> Iterator[None]:
    """A process that takes half of a core from the rank that is bound to it, until the block ends."""
    with subprocess.Popen([sys.executable, "-c", _HOG, str(core), str(os.getpid())], start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> int:
    """Run, and print one line for each run and a summary. Returns 1 if one of them was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs with a hog, and as many without (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two cores are needed")
    chance = random.Random(options.seed)
    right = {"hog": 0, "normal": 0}
    for number in range(options.runs):
        for kind in right:
            with tempfile.TemporaryDirectory(prefix="ddptrain-slow-") as folder:
                slow = chance.randrange(2)
                hogged = cores[slow] if kind == "hog" else None
                found = slow_rank_events(Path(folder), cores if kind == "hog" else [], hogged)
                is_right = [event["rank"] for event in found] == ([slow] if kind == "hog" else [])
            right[kind] += is_right
            named = [(event["rank"], event["own_s"], event["median_s"], event["causes"]) for event in found]
            expected = f"rank {slow}" if kind == "hog" else "none"
            print(f"{number + 1} {kind}: expected {expected}, named {named or 'none'}: {is_right}", flush=True)
    for kind, count in right.items():
        print(f"{kind}: {count} of {options.runs} runs right")
    return int(min(right.values()) < options.runs)


if __name__ == "__main__":
    sys.exit(main())
