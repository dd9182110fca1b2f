"""From the kill of a rank to the next step of the restarted worker group, compared with torchrun if it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.experiments.first_step import named_cluster
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_RANKS = 2
_TRIES = 8  # torchrun often fails for good instead


def _recovered(stage: Stage, command: Sequence[str], marks: Path) -> Figures:
    """Seconds from the fault to the last rank's first step in the second attempt."""
    files = [marks / f"step-{rank}" for rank in range(_RANKS)]

    def complete() -> bool:
        return all(file.exists() for file in files)

    stage.run(command, complete=complete)
    if not complete():
        raise BenchError("the ranks were not started again")
    return {"again_s": (max(int(file.read_text()) for file in files) - int((marks / "fault").read_text())) / 1e9}


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def torchrun() -> Figures:
        for _ in range(_TRIES - 1):
            try:
                return _torchrun_once()
            except BenchError:
                pass
        return _torchrun_once()

    def _torchrun_once() -> Figures:
        marks = stage.new_folder("torchrun")
        command = stage.torchrun("restart", _RANKS, "--max-restarts", "1", folder=str(marks))
        return _recovered(stage, command, marks)

    with named_cluster(stage, _RANKS) as cluster:

        def ours() -> Figures:
            marks = stage.new_folder("ddptrain")
            options = [*cluster, "--set", "failure.max_restarts=1"]
            return _recovered(stage, stage.ddptrain("restart", _RANKS, *options, folder=str(marks)), marks)

        yield {"ours": ours, "torchrun": torchrun}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="restart",
            unit="s",
            ours=Source("ours", "again_s"),
            peer=Source("torchrun", "again_s"),
            peer_name="torchrun --max-restarts 1, where it recovers",
            goal=Goal("ratio", "<=", 0.2),
            what="a rank's SIGKILL to the next step of all ranks, 2 warm ranks, one restart",
        ),
    ),
    open=_open,
)
