"""The time of `ddptrain --help`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import TORCHRUN, Stage


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def cpu(program: str) -> Figures:
        return {"cpu_s": stage.run([program, "--help"]).cpu_s}

    cpu(stage.command)  # byte code is written
    yield {"help-ddptrain": lambda: cpu(stage.command), "help-torchrun": lambda: cpu(TORCHRUN)}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="help",
            unit="CPU s",
            ours=Source("help-ddptrain", "cpu_s"),
            peer=Source("help-torchrun", "cpu_s"),
            peer_name="torchrun --help",
            goal=Goal("ours", "<=", 0.3),
            what="user and system time of the process `ddptrain --help`",
        ),
    ),
    open=_open,
)
