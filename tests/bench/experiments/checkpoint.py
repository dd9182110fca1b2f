"""The training time that a checkpoint takes: written in a thread, compared with torch.save and DCP's async_save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_PEERS = {"torch": "torch.save in the loop", "dcp": "torch.distributed.checkpoint.async_save"}


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    yield _variants(stage, stage.sizes.checkpoint_mb, stage.sizes.checkpoints)


@contextmanager
def _open_large(stage: Stage) -> Iterator[Variants]:
    yield _variants(stage, stage.sizes.large_checkpoint_mb, stage.sizes.large_checkpoints)


def _variants(stage: Stage, mega_bytes: int, checkpoints: int) -> Variants:
    def lost(kind: str) -> Figures:
        out = stage.new_folder(f"checkpoint-{kind}") / "lost.json"
        params = {"mega_bytes": mega_bytes, "checkpoints": checkpoints, "kind": kind}
        # One thread, so that a core is left, as there is beside a GPU.
        options = ("--set", "checkpoint.keep=1", "--set", 'env.OMP_NUM_THREADS="1"')
        stage.run(stage.ddptrain("checkpoint", 1, *options, out=str(out), **params))
        if not out.exists():
            raise BenchError("rank 0 wrote no figures")
        figures: Figures = json.loads(out.read_text())
        return figures

    return {"ours": lambda: lost("ours"), "torch": lambda: lost("torch"), "dcp": lambda: lost("dcp")}


def _rows(name: str, size: str) -> tuple[Row, ...]:
    """The time that a checkpoint blocks the training loop, and the whole training time that is lost to it."""
    state = f"a checkpoint of {size} (weights, Adam's moments), one rank on one core"
    stall = f"seconds for which the call blocks the training loop: {state}"
    lost = f"the same, and the slower steps while it is written: {state}"
    return (
        _row(name, "call_s", "torch", 0.1, stall),
        _row(f"{name}-dcp", "call_s", "dcp", 0.7, stall),
        _row(f"{name}-lost", "lost_s", "torch", 0.1, lost, chosen_with=name),
        _row(f"{name}-lost-dcp", "lost_s", "dcp", 0.7, lost, chosen_with=f"{name}-dcp"),
    )


def _row(name: str, figure: str, kind: str, bound: float, what: str, chosen_with: str = "") -> Row:
    return Row(
        name=name,
        unit="s",
        ours=Source("ours", figure),
        peer=Source(kind, figure),
        peer_name=_PEERS[kind],
        goal=Goal("ratio", "<=", bound),
        what=what,
        chosen_with=chosen_with,
    )


EXPERIMENT = Experiment(rows=_rows("checkpoint", "500 MB"), open=_open)
LARGE = Experiment(
    rows=_rows("checkpoint-large", "3 GB"),
    open=_open_large,
    slow=frozenset({"ours", "torch", "dcp"}),
)
