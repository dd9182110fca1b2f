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
    yield _variants(stage, stage.sizes.checkpoint_mb)


@contextmanager
def _open_large(stage: Stage) -> Iterator[Variants]:
    yield _variants(stage, stage.sizes.large_checkpoint_mb)


def _variants(stage: Stage, mega_bytes: int) -> Variants:
    def lost(kind: str) -> Figures:
        out = stage.new_folder(f"checkpoint-{kind}") / "lost.json"
        params = {"mega_bytes": mega_bytes, "checkpoints": stage.sizes.checkpoints, "kind": kind}
        # One thread, so that a core is left, as there is beside a GPU.
        options = ("--set", "checkpoint.keep=1", "--set", 'env.OMP_NUM_THREADS="1"')
        stage.run(stage.ddptrain("checkpoint", 1, *options, out=str(out), **params))
        if not out.exists():
            raise BenchError("rank 0 wrote no figures")
        figures: Figures = json.loads(out.read_text())
        return figures

    return {"ours": lambda: lost("ours"), "torch": lambda: lost("torch"), "dcp": lambda: lost("dcp")}


def _row(name: str, kind: str, bound: float, size: str = "500 MB") -> Row:
    return Row(
        name=name,
        unit="s",
        ours=Source("ours", "lost_s"),
        peer=Source(kind, "lost_s"),
        peer_name=_PEERS[kind],
        goal=Goal("ratio", "<=", bound),
        what=f"step time lost to a checkpoint of {size} (weights, Adam's moments), one rank on one core",
    )


EXPERIMENT = Experiment(
    rows=(
        _row("checkpoint", "torch", 0.1),
        Row(
            name="checkpoint-call",
            unit="s",
            ours=Source("ours", "call_s"),
            peer=Source("dcp", "call_s"),
            peer_name=_PEERS["dcp"],
            goal=None,
            what="seconds of the call alone; the rest of the lost time is slower steps while the checkpoint is written",
            chosen_with="checkpoint-dcp",
        ),
        _row("checkpoint-dcp", "dcp", 0.7),
    ),
    open=_open,
)
LARGE = Experiment(
    rows=(_row("checkpoint-large", "torch", 0.1, "3 GB"), _row("checkpoint-large-dcp", "dcp", 0.7, "3 GB")),
    open=_open_large,
    slow=frozenset({"ours", "torch", "dcp"}),
)
