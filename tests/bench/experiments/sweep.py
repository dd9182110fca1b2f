"""A sweep of short trials, two at a time, with start and end of its cluster; peers: one torchrun a trial, Ray Tune."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.peers import python_with
from tests.bench.stage import Stage

_RANKS, _PARALLEL, _STEPS = 2, 2, 20
_RAY = "ray[train,tune]==2.60.0"
_RAY_ENV = {"RAY_TRAIN_V2_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_RAY_TIMEOUT_S = 1800.0
_WHAT = "16 trials of 2 ranks and 20 steps of a small LSTM, two at a time, with start and end of the cluster"


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
        done = stage.run([stage.command, "sweep", str(path), "--runs-dir", str(runs), "--output", "plain"])
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

    def ray() -> Figures:
        python = python_with("ray", [_RAY, f"torch=={version('torch').partition('+')[0]}"])
        settings = {"ranks": _RANKS, "parallel": _PARALLEL, "steps": _STEPS, "trials": trials}
        given = json.dumps({**settings, "folder": str(stage.new_folder("ray"))})
        command = [str(python), str(stage.programs / "ray_trials.py"), given]
        # In a folder with a short name: it holds unix sockets. HOME: Ray keeps a token there.
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
            env = {**_RAY_ENV, "RAY_TMPDIR": scratch, "HOME": scratch, "PYTHONPATH": str(stage.programs)}
            return {"wall_s": stage.run(command, env=env, timeout_s=_RAY_TIMEOUT_S).wall_s}

    yield {"ours": ours, "torchrun": torchrun, "ray": ray}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="sweep",
            unit="s",
            ours=Source("ours", "wall_s"),
            peer=Source("torchrun", "wall_s"),
            peer_name="one torchrun for each trial",
            goal=Goal("ratio", "<=", 0.14),
            what=_WHAT,
        ),
        Row(
            name="sweep-ray",
            unit="s",
            ours=Source("ours", "wall_s"),
            peer=Source("ray", "wall_s"),
            peer_name="Ray Tune with a TorchTrainer for each trial",
            goal=Goal("ratio", "<=", 0.1),
            what="the same, also chosen by --rows sweep",
            chosen_with="sweep",
        ),
    ),
    open=_open,
    slow=frozenset({"ray"}),
)
