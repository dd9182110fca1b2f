"""A small training that is tracked with W&B, and what it has left: in the run directory, and in offline runs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import time
from glob import glob
from pathlib import Path
from typing import Any

from tests.conftest import Cli, Finished, Running
from tests.servers.wandb_backend import API_KEY

Record = dict[str, Any]

WORKLOAD = '''
import os, time
from pathlib import Path

import psutil
import torch


def wait_until(true):
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_core():
    """Once it is there."""
    def cores():
        return [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]
    wait_until(cores)
    for core in cores():
        core.kill()


def steps(ctx, steps=40, pause=0.0, wait_at=0, kill_core_of=None, fail_at=()):
    """Logs in every step; waits at one of them for the file `go`; fails at each of `fail_at` once."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = ctx.resume(model=model, optimizer=optimizer)
    for step in range((found.step if found else 0) + 1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        ctx.log({"train/loss": 1 / step, "train/rank": ctx.rank}, step=step, epoch=step / steps)
        if step % 10 == 0:
            ctx.checkpoint(model=model, optimizer=optimizer, step=step, metrics={"val/loss": 10 / step})
        if step == wait_at:
            wait_until(Path("go").exists)
            if ctx.rank == kill_core_of:
                kill_core()
        if step in fail_at and ctx.rank == 0 and not Path(f"failed-{step}").exists():
            Path(f"failed-{step}").touch()
            raise ValueError(f"boom at {step}")
        time.sleep(pause)
    ctx.log_table("train_predictions", ["name", "score"], [["rex", 0.5], ["bella", 0.25]])
    print("trained until", time.time(), flush=True)
'''


class Training:
    """A folder with the workload; trains it with W&B on."""

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.folder, self.cli = folder, cli
        (folder / "work.py").write_text(WORKLOAD)

    def start(self, shell: dict[str, str], *args: str, ranks: int = 2, params: object = None, **more: Any) -> Running:
        """Train with `more` as the `wandb` section of the configuration, or as what stands beside it."""
        beside: Record = {key: more.pop(key) for key in ("failure", "env", "tracking", "checkpoint") if key in more}
        config: Record = {"name": "pets", "workload": "work:steps", "params": params or {}, "cluster": {"ranks": ranks}}
        config |= {**beside, "tracking": {"wandb": {"log_every": 1, **more}, **beside.get("tracking", {})}}
        (self.folder / "run.yaml").write_text(json.dumps(config))
        return self.cli.start("train", "run.yaml", *args, env={"WANDB_API_KEY": "", "HOME": str(self.folder), **shell})

    def train(self, shell: dict[str, str], *args: str, **more: Any) -> Finished:
        """The same, to its end."""
        return self.start(shell, *args, **more).finish(100)

    @property
    def run_dir(self) -> Path:
        """That of the one run."""
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    @property
    def record(self) -> Record:
        """Its run.json."""
        record: Record = json.loads((self.run_dir / "run.json").read_text())
        return record

    def events(self) -> list[Record]:
        """What has happened so far, as events.jsonl has it; nothing before there is one."""
        (file,) = [*self.folder.glob("runs/*/events.jsonl")] or [Path(os.devnull)]
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    def metrics(self, rank: int) -> list[Record]:
        """The rows of a rank in the run directory."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["rank"] == rank]

    def offline(self) -> list[OfflineRun]:
        """What W&B has recorded below the run directory, in the order of the runs' names."""
        files = glob(f"{self.run_dir}/tracking/**/run-*.wandb", recursive=True)  # other folders may go meanwhile
        return sorted((OfflineRun(Path(path)) for path in files), key=lambda run: run.name)

    def s_beyond_training(self, ended_at: float) -> float:
        """Seconds from the end of the last rank's training to `ended_at` (time.time)."""
        logs = [path.read_text() for path in (self.run_dir / "logs").glob("rank-*.log")]
        return ended_at - max(float(found) for log in logs for found in re.findall(r"trained until ([\d.]+)", log))

    def assert_key_is_nowhere(self, *said: Finished) -> None:
        """It stands neither in a file of the run directory nor in what was said."""
        key = API_KEY.encode()
        holders = [path for path in self.run_dir.rglob("*") if path.is_file() and key in path.read_bytes()]
        assert not holders
        assert not any(API_KEY in ended.stdout + ended.stderr for ended in said)

    def assert_unharmed(self, ended: Finished, *, ranks: int, steps: int = 40) -> None:
        """Training succeeded, and the run directory has every row."""
        assert ended.rc == 0, ended.stderr
        assert self.record["status"] == "succeeded"
        for rank in range(ranks):
            assert [row["step"] for row in self.metrics(rank) if "train/loss" in row] == [*range(1, steps + 1)]
        self.assert_key_is_nowhere(ended)


class OfflineRun:
    """The records of a .wandb file, as `wandb leet inspect --json` reads them."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.find_spec("wandb")
        assert spec and spec.origin
        # What that command starts, without the second that importing wandb takes.
        core = Path(spec.origin).parent / "bin" / "wandb-core"
        words = [core, "leet", "inspect", "--no-observability", "--json", "--run-file", path, path.parent]
        read = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
        self.path = path
        self.records = [json.loads(line) for line in read.stdout.splitlines()]

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def run(self) -> Record:
        """What the run was begun with: run_id, project, run_group, display_name, config."""
        return dict((self.of("run") or [{}])[0])

    @property
    def name(self) -> str:
        """The name that people see."""
        return str(self.run.get("display_name", ""))

    @property
    def history(self) -> list[Record]:
        """The rows."""
        return [dict(record["item"]) for record in self.of("history")]

    @property
    def exit_code(self) -> int | None:
        """What it was finished with; None if it was not."""
        return self.of("exit")[-1].get("exit_code", 0) if self.of("exit") else None


def wait_until_rows(training: Training, runs: int, least: int = 1, timeout_s: float = 90) -> None:
    """Return once that many runs below the run directory have `least` rows on disk, or more."""
    deadline = time.monotonic() + timeout_s
    while sum(len(run.history) >= least for run in training.offline()) < runs:
        assert time.monotonic() < deadline, f"not {runs} runs have {least} rows"
        time.sleep(0.2)
