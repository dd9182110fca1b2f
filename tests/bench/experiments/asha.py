"""What a sweep saves that ends poor trials early: a grid with ASHA against the same grid without it, on pet names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddptrain.sweep.records import read_sweep
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import Stage

_SPACE: dict[str, list[object]] = {
    "params.learning_rate": [0.0005, 0.002, 0.008, 0.032],
    "params.hidden_size": [32, 64, 128],
    "params.output_dropout": [0.0, 0.3],
}
_PARAMS = {
    "names": "builtin",
    "context": "full",
    "input": "embedding",
    "embedding_size": 32,
    "layers": 1,
    "dropout": 0.0,
    "batch_size": 64,
    "weight_decay": 0.05,
    "grad_clip": 1.0,
}
_TIMEOUT_S = 3600.0


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    seeds = itertools.count()

    def search(**section: Any) -> Figures:
        runs = stage.new_folder("asha")
        config = {
            "workload": "petnames",
            "params": {**_PARAMS, "epochs": stage.sizes.asha_epochs},
            "checkpoint": {"every_epochs": 1, "keep": 1},
            "sweep": {"space": _SPACE, "metric": "val/loss", "ranks": 1, "parallel": 2, **section},
        }
        path = stage.programs / f"{runs.name}.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [stage.command, "sweep", str(path), "--runs-dir", str(runs), "--sweep-id", "s", "--output", "plain"]
        stage.run(command, timeout_s=_TIMEOUT_S)
        record = read_sweep(runs / "s")
        best = record.find_best()
        assert best is not None and best.value is not None
        return {"steps": sum(trial.step or 0 for trial in record.trials), "loss": best.value}

    def grid() -> Figures:
        return search(search="grid", prune="none")

    def asha() -> Figures:
        return search(search="grid", prune={"asha": {"min_resource": 2}}, seed=next(seeds))

    yield {"grid": grid, "asha": asha}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="asha-steps",
            unit="steps",
            ours=Source("asha", "steps"),
            peer=Source("grid", "steps"),
            peer_name="the same points without a pruner, once",
            goal=Goal("ratio", "<=", 0.35),
            what="steps of a grid of 24 points, pet names, which ASHA compares after 2 and 6 of 18 epochs; each has "
            "another order of points",
        ),
        Row(
            name="asha-loss",
            unit="",
            ours=Source("asha", "loss"),
            peer=Source("grid", "loss"),
            peer_name="the same",
            goal=Goal("ratio", "<=", 1.01),
            what="the best validation loss of these sweeps",
            chosen_with="asha-steps",
        ),
    ),
    open=_open,
    slow=frozenset({"grid"}),
)
