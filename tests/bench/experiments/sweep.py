"""A sweep of short trials, two at a time, with the start and the end of its cluster; one torchrun for each trial."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import DDPTRAIN, Stage

_RANKS, _PARALLEL, _STEPS = 2, 2, 20


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    trials = stage.sizes.trials

    def ours() -> Figures:
        runs = stage.new_folder("sweep")
        section = {"space": {"params.learning_rate": {"log": [0.001, 0.1]}}, "trials": trials, "search": "random"}
        section |= {"metric": "loss", "ranks": _RANKS, "parallel": _PARALLEL}
        config = {"workload": "trial:workload", "params": {"steps": _STEPS}, "sweep": section}
        path = stage.programs / "sweep.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        done = stage.run([DDPTRAIN, "sweep", str(path), "--runs-dir", str(runs), "--output", "plain"])
        return {"wall_s": done.wall_s}

    def torchrun() -> Figures:
        rates = [0.001 * 1.3**number for number in range(trials)]
        folders = [stage.new_folder("torchrun") for _ in rates]
        began = time.perf_counter()
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(one_torchrun, rates, folders))
        return {"wall_s": time.perf_counter() - began}

    def one_torchrun(learning_rate: float, done: Path) -> None:
        command = stage.torchrun("trial", _RANKS, learning_rate=learning_rate, steps=_STEPS, done=str(done))
        stage.run(command, complete=lambda: len(list(done.iterdir())) == _RANKS)

    yield {"ours": ours, "torchrun": torchrun}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="sweep",
            unit="s",
            ours=Source("ours", "wall_s"),
            peer=Source("torchrun", "wall_s"),
            peer_name="one torchrun for each trial",
            goal=Goal("ratio", "<=", 0.14),
            what="16 trials of 2 ranks and 20 steps of a small LSTM, two at a time, with start and end of the cluster",
        ),
    ),
    open=_open,
)
