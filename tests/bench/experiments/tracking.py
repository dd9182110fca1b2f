"""The cost of trackers: per step, per call of ctx.log, and at the end of a run with a dead W&B server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage
from tests.servers.wandb_backend import wandb_backend

_OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}

# A rank, so that none waits for a core that another one, or a tracker, has.
_ONE_THREAD = ("--set", 'env.OMP_NUM_THREADS="1"')


def _wandb(mode: str) -> tuple[str, ...]:
    return ("--set", f"tracking.wandb.mode={mode}")


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def tracked(options: Sequence[str]) -> Figures:
        out = stage.new_folder("tracked") / "step.json"
        times = {"warm_s": stage.sizes.tracked_warm_s, "seconds": stage.sizes.tracked_s}
        stage.run(stage.ddptrain("tracked", 2, *options, *_ONE_THREAD, out=str(out), **times), env=_OFFLINE)
        return _figures(out)

    def log() -> Figures:
        out = stage.new_folder("log-tracked") / "call.json"
        options = (*_wandb("rank0"), "--set", "tracking.tensorboard.mode=rank0", *_ONE_THREAD)
        stage.run(stage.ddptrain("log", 1, *options, out=str(out), tracked=True), env=_OFFLINE)
        return _figures(out)

    yield {
        "untracked": lambda: tracked(_wandb("off")),
        "wandb-rank0": lambda: tracked(_wandb("rank0")),
        "wandb-process": lambda: tracked(_wandb("process")),
        "log": log,
        "dead-server": lambda: _dead_server(stage),
    }


def _dead_server(stage: Stage) -> Figures:
    """Seconds from the end of training to the end of the command; the W&B server dies soon after the start."""
    out = stage.new_folder("dead-server") / "step.json"
    command = stage.ddptrain("tracked", 1, *_wandb("rank0"), out=str(out), warm_s=5.0, seconds=0.5)
    with wandb_backend() as backend:
        backend.die_after(0)
        stage.run(command, env=backend.environment)
        ended_at = time.time()
        if not backend.stopped.is_set():
            raise BenchError("the server had nothing to die of")
    figures = _figures(out)
    run_dir = stage.programs / "runs" / command[command.index("--run-id") + 1]
    rows = len((run_dir / "metrics.jsonl").read_text().splitlines())
    if rows != figures["steps"]:
        raise BenchError(f"{rows} rows are in the run directory, {figures['steps']} were logged")
    return {"end_s": ended_at - figures["ended_at"]}


def _figures(out: Path) -> Figures:
    if not out.exists():
        raise BenchError("rank 0 wrote no figures")
    figures: Figures = json.loads(out.read_text())
    return figures


def _step(mode: str, bound: float) -> Row:
    return Row(
        name=f"tracked-{mode}",
        unit="ms",
        ours=Source(f"wandb-{mode}", "step_ms"),
        peer=Source("untracked", "step_ms"),
        peer_name="no tracker",
        goal=Goal("ratio", "<=", bound),
        what=f"a step of about 5 ms on 2 ranks, a core each, with W&B offline in mode {mode}, log_every 10",
    )


EXPERIMENT = Experiment(
    rows=(
        _step("rank0", 1.03),
        _step("process", 1.05),
        Row(
            name="tracked-log",
            unit="us",
            ours=Source("log", "call_us"),
            peer=None,
            peer_name="",
            goal=Goal("ours", "<=", 30),
            what="a call of ctx.log with five numbers, in bursts of 500, with W&B and TensorBoard on",
        ),
        Row(
            name="tracked-dead-server",
            unit="s",
            ours=Source("dead-server", "end_s"),
            peer=None,
            peer_name="",
            goal=Goal("ours", "<=", 35),
            what="the command's end after that of training, when the W&B server has died in the middle",
        ),
    ),
    open=_open,
)
