"""One training loop as a user's function, against the same loop under torchrun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_MODELS = {
    "mlp": "a small network on batches of 64, whose memory the C library keeps either way",
    "lstm": "the tutorial's LSTM on batches of 1024 windows, whose memory the C library gives back after each step",
}


def _rate(out: Path) -> Figures:
    record = json.loads(out.read_text())
    return {"samples_per_s": record["samples"] / record["seconds"]}


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def torchrun(model: str) -> Figures:
        out = stage.new_folder("torchrun") / "rate.json"
        command = stage.torchrun("steady", 2, out=str(out), model=model, seconds=stage.sizes.steady_s)
        stage.run(command, complete=out.exists)
        return _rate(out)

    def ddptrain(model: str) -> Figures:
        out = stage.new_folder("ddptrain") / "rate.json"
        stage.run(stage.ddptrain("steady", 2, out=str(out), model=model, seconds=stage.sizes.steady_s))
        if not out.exists():
            raise BenchError("rank 0 wrote no rate")
        return _rate(out)

    def script() -> Figures:
        out = stage.new_folder("script") / "rate.json"
        stage.run(stage.script("steady", 2, out=str(out), model="mlp", seconds=stage.sizes.steady_s))
        return _rate(out)

    yield {
        "script-mlp": script,
        "torchrun-mlp": lambda: torchrun("mlp"),
        "ddptrain-mlp": lambda: ddptrain("mlp"),
        "torchrun-lstm": lambda: torchrun("lstm"),
        "ddptrain-lstm": lambda: ddptrain("lstm"),
    }


def _row(model: str) -> Row:
    return Row(
        name=f"steady-{model}",
        unit="samples/s",
        ours=Source(f"ddptrain-{model}", "samples_per_s"),
        peer=Source(f"torchrun-{model}", "samples_per_s"),
        peer_name="torchrun",
        goal=Goal("ratio", ">=", 0.98),
        what=f"steady rate of one loop on 2 ranks, as user function: {_MODELS[model]}",
    )


_SCRIPT = Row(
    name="steady-script",
    unit="samples/s",
    ours=Source("script-mlp", "samples_per_s"),
    peer=Source("torchrun-mlp", "samples_per_s"),
    peer_name="torchrun",
    goal=Goal("ratio", ">=", 0.98),
    what="the same as steady-mlp, as the unchanged script that torchrun runs",
)

EXPERIMENT = Experiment(rows=(*map(_row, _MODELS), _SCRIPT), open=_open)
