"""New names from a trained model: in batches, compared with the tutorial's loop over single names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import REPOSITORY, BenchError, Stage

_GOALS = {"window": 12.0, "full": 60.0}
_CONFIG = REPOSITORY / "configs" / "petnames-tutorial.yaml"
# Enough for names to have the lengths and beginnings of names.
_TRAINING = {"epochs": 6, "batch_size": 128, "learning_rate": 0.005}
_FULL = {"epochs": 16, "batch_size": 32, "context": "full"}


def _train(stage: Stage, context: str) -> Path:
    """A short training of the tutorial's model on the builtin names; returns the run directory."""
    params = {**_TRAINING, **(_FULL if context == "full" else {})}
    return stage.trained(_CONFIG, context, params)


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    run_dirs: dict[str, Path] = {}

    def run_dir(context: str) -> Path:
        if context not in run_dirs:
            run_dirs[context] = _train(stage, context)
        return run_dirs[context]

    def in_process(context: str, way: str, count: int) -> Figures:
        params = {"run_dir": str(run_dir(context)), "count": count, "way": way}
        done = stage.run([stage.python, stage.programs / "generation.py", json.dumps(params)])
        record = json.loads(done.stdout)
        if record["names"] != count:
            raise BenchError(f"{record['names']} names instead of {count}")
        return {"names_per_s": count / record["seconds"]}

    def command(context: str) -> Figures:
        count = stage.sizes.generated
        done = stage.run([stage.command, "generate", run_dir(context), "--count", str(count), "--seed", "0"])
        if len(done.stdout.splitlines()) != count:
            raise BenchError(f"{len(done.stdout.splitlines())} names instead of {count}: {done.stderr}")
        return {"wall_s": done.wall_s}

    variants: dict[str, Callable[[], Figures]] = {}
    for context in _GOALS:
        variants[f"one-by-one-{context}"] = partial(in_process, context, "loop", stage.sizes.generated_one_by_one)
        variants[f"library-{context}"] = partial(in_process, context, "library", stage.sizes.generated)
        variants[f"command-{context}"] = partial(command, context)
    yield variants


def _names(context: str) -> Row:
    return Row(
        name=f"generate-{context}",
        unit="names/s",
        ours=Source(f"library-{context}", "names_per_s"),
        peer=Source(f"one-by-one-{context}", "names_per_s"),
        peer_name="tutorial's loop",
        goal=Goal("ratio", ">=", _GOALS[context]),
        what=f"generate_names for 10,000 new names, context: {context}, in a process that has torch imported; "
        "the tutorial's loop makes 50 from the same weights, both drop known and repeated names",
    )


def _command(context: str) -> Row:
    return Row(
        name=f"generate-{context}-command",
        unit="s",
        ours=Source(f"command-{context}", "wall_s"),
        peer=None,
        peer_name="",
        goal=None,
        what=f"the whole of `ddptrain generate RUN --count 10000`, context: {context}",
    )


EXPERIMENT = Experiment(rows=(*map(_names, _GOALS), *map(_command, _GOALS)), open=_open)
