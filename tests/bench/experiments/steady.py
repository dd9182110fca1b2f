"""One training loop as a user's function, against the same loop under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ddptrain.worker.environment import tuned_defaults
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
    def torchrun(model: str, env: Mapping[str, str]) -> Figures:
        out = stage.new_folder("torchrun") / "rate.json"
        command = stage.torchrun("steady", 2, out=str(out), model=model, seconds=stage.sizes.steady_s)
        stage.run(command, env=env, complete=out.exists)
        return _rate(out)

    def ddptrain(model: str) -> Figures:
        out = stage.new_folder("ddptrain") / "rate.json"
        stage.run(stage.ddptrain("steady", 2, out=str(out), model=model, seconds=stage.sizes.steady_s))
        if not out.exists():
            raise BenchError("rank 0 wrote no rate")
        return _rate(out)

    variants: dict[str, Callable[[], Figures]] = {}
    for model in _MODELS:
        variants[f"torchrun-{model}"] = partial(torchrun, model, {})
        variants[f"ddptrain-{model}"] = partial(ddptrain, model)
        variants[f"torchrun-malloc-{model}"] = partial(torchrun, model, tuned_defaults())
    yield variants


def _row(model: str, *, malloc: bool) -> Row:
    settings = " ".join(f"{name}={value}" for name, value in tuned_defaults().items())
    return Row(
        name=f"steady-{model}" + ("-malloc" if malloc else ""),
        unit="samples/s",
        ours=Source(f"ddptrain-{model}", "samples_per_s"),
        peer=Source(f"torchrun-malloc-{model}" if malloc else f"torchrun-{model}", "samples_per_s"),
        peer_name="torchrun, tuned" if malloc else "torchrun",
        goal=None if malloc else Goal("ratio", ">=", 0.98),
        what=f"torchrun given what ddptrain sets by default: {settings}"
        if malloc
        else f"steady rate of one loop on 2 ranks, as user function: {_MODELS[model]}",
    )


EXPERIMENT = Experiment(
    rows=tuple(_row(model, malloc=malloc) for model in _MODELS for malloc in (False, True)), open=_open
)
