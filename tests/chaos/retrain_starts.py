"""`python -m tests.chaos.retrain_starts`: many starts of one retraining, from two hosts, while processes are killed.

Each of several processes starts `ddptrain retrain` at random times, for the scheduled time of the moment. They run in
two network namespaces and share an S3 store. Every few seconds one of them is killed. At the end there must be at most
one training for each scheduled time, no version twice, an unbroken history, and at no time an incomplete champion.

Needs root, iproute2, and SeaweedFS (the dev extra).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ddptrain.errors import DdptrainError, one_line
from ddptrain.model_registry.reference import CHAMPION
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords, RetrainStatus
from tests.servers.seaweed import seaweed

_ADDRESS, _MODEL = "10.84.0.1", "mine"
_TRAINED = (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
_WORKLOAD = """
import torch


def main(ctx, steps: int = 3):
    model = torch.nn.Linear(2, 1)
    for step in range(1, steps + 1):
        ctx.checkpoint(model=model, step=step, epoch=step, metrics={"val/loss": float(torch.rand(()))})
"""
_CONFIG = """
workload: mine:main
cluster: {ranks: 1}
results: {dir: "s3://bucket/runs"}
models: {dir: "s3://bucket/models"}
retrain:
  model: mine
  if_unchanged: train
  gate: {metric: val/loss, better_by: -0.5}
  keep: {versions: 1000, runs: 1000, failed_runs: 1000}
"""


@dataclass(slots=True)
class Starts:
    """What the processes share: the folder, the environment, and what has come out so far."""

    folder: Path
    environment: dict[str, str]
    number: int
    slot_s: float
    draw: random.Random
    begun: int = 0
    killed: int = 0
    checks: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    running: set[subprocess.Popen[str]] = field(default_factory=set)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)


def main() -> int:
    """Run the starts; print what came out, and return 0 if it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="S")
    parser.add_argument("--slot", type=float, default=20.0, metavar="S", help="seconds between two scheduled times")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddptrain-starts-") as name, _hosts() as hosts:
        folder = Path(name)
        (folder / "mine.py").write_text(_WORKLOAD)
        (folder / "mine.yaml").write_text(_CONFIG)
        (folder / "store").mkdir()
        with seaweed(folder / "store", "bucket", _ADDRESS) as variables:
            private = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
            os.environ.update({**variables, **private})
            draw = random.Random(options.seed)
            starts = Starts(folder, dict(os.environ), options.starts, options.slot, draw)
            _run(starts, hosts, options.processes, options.kill_every)
            return _report(starts)


@contextlib.contextmanager
def _hosts() -> Iterator[list[str]]:
    """Two network namespaces that reach this machine at one address."""
    bridge, names = f"ddp{os.getpid()}", [f"ddptrain-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{_ADDRESS}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            outside, inside = f"{bridge}o{number}", f"{bridge}i{number}"
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("link", "set", inside, "netns", name)
            _ip("-n", name, "addr", "add", f"10.84.0.{number + 2}/24", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _run(starts: Starts, hosts: list[str], processes: int, kill_every_s: float) -> None:
    threads = [threading.Thread(target=_start_often, args=(starts, hosts[n % len(hosts)])) for n in range(processes)]
    others = [
        threading.Thread(target=_kill, args=(starts, kill_every_s)),
        threading.Thread(target=_check_champion, args=(starts,)),
    ]
    for thread in [*threads, *others]:
        thread.start()
    for thread in threads:
        thread.join()
    starts.over.set()
    for thread in others:
        thread.join()


def _start_often(starts: Starts, host: str) -> None:
    """Start the command again and again, at random times, until there were enough starts."""
    while True:
        with starts.mutex:
            if starts.begun >= starts.number:
                return
            starts.begun += 1
            pause_s = starts.draw.uniform(0.0, 2.0)
        time.sleep(pause_s)
        moment = datetime.fromtimestamp(time.time() // starts.slot_s * starts.slot_s, UTC)
        command = [sys.executable, "-m", "ddptrain", "retrain", "mine.yaml", "--slot", moment.isoformat()]
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, *command, "--output", "json"],
            cwd=starts.folder,
            env=starts.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with starts.mutex:
            starts.running.add(process)
        output, _ = process.communicate()
        with starts.mutex:
            starts.running.discard(process)
            _count_end(starts, process.returncode, output)


def _count_end(starts: Starts, status: int, output: str) -> None:
    last = output.strip().splitlines()[-1:] or [""]
    if status == -signal.SIGKILL:
        starts.ends["killed"] += 1
        return
    try:
        end = json.loads(last[0])
        starts.ends[f"{end['status']} ({status})"] += 1
        if end["status"] not in ("promoted", "skipped"):
            starts.problems.append(f"a start ended as {end['status']}: {end['reason']}")
    except (ValueError, LookupError):
        starts.ends[f"exit {status}"] += 1
        starts.problems.append(f"a start ended with {status}: {last[0][:300]}")


def _kill(starts: Starts, every_s: float) -> None:
    while not starts.over.wait(every_s):
        with starts.mutex:
            victims = sorted(starts.running, key=lambda process: process.pid)
            if victims:
                starts.killed += 1
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(starts.draw.choice(victims).pid, signal.SIGKILL)


def _check_champion(starts: Starts) -> None:
    """Verify the champion again and again: it must be complete at all times."""
    registry = ModelRegistry.open("s3://bucket/models")
    while not starts.over.wait(0.5):
        try:
            champion = registry.state(_MODEL).version_of(CHAMPION)
            if champion is not None:
                registry.verify(registry.version(_MODEL, champion))
                starts.checks += 1
        except DdptrainError as error:
            starts.problems.append(f"the champion was not complete: {one_line(error)}")


def _report(starts: Starts) -> int:
    registry = ModelRegistry.open("s3://bucket/models")
    records = RetrainRecords(registry.folder, _MODEL).newest(starts.number)
    by_slot: dict[str, list[RetrainRecord]] = {}
    for record in records:
        by_slot.setdefault(record.slot, []).append(record)
    problems = [*starts.problems]
    for slot, found in sorted(by_slot.items()):
        trained = [record for record in found if record.status in _TRAINED]
        if len(trained) > 1:
            problems.append(f"slot {slot} was trained {len(trained)} times: {[each.number for each in trained]}")
    versions = registry.versions(_MODEL)
    if len({version.run_id for version in versions}) < len(versions):
        problems.append("two versions are of the same run")
    champion = None
    promoted = [change for change in registry.history(_MODEL) if change.action == "promoted"]
    for change in promoted:
        if change.aliases.get("previous") != champion:
            problems.append(f"entry {change.number} of the history does not follow from the one before it")
        champion = change.version
    if len({change.version for change in promoted}) < len(promoted):
        problems.append("a version was promoted twice")
    continued = sum(record.starts > 1 for record in records)
    print(f"{starts.begun} starts, {starts.killed} killed: {dict(starts.ends.most_common())}")
    print(f"{len(by_slot)} scheduled times, {len(records)} retrainings, {continued} of them continued after a kill")
    print(f"{len(versions)} versions, {len(promoted)} promotions; the champion was verified {starts.checks} times")
    print("\n".join(["problems:", *problems]) if problems else "no problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
