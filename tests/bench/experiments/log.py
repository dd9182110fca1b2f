"""The time that logging adds to a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def ours() -> Figures:
        out = stage.new_folder("log") / "call.json"
        stage.run(stage.ddptrain("log", 1, out=str(out)))
        if not out.exists():
            raise BenchError("the rank wrote no figure")
        figures: Figures = json.loads(out.read_text())
        return figures

    yield {"ours": ours}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="log",
            unit="us",
            ours=Source("ours", "call_us"),
            peer=None,
            peer_name="",
            goal=Goal("ours", "<=", 20),
            what="a call of ctx.log with five numbers, one after the other without a step between them",
        ),
    ),
    open=_open,
)
