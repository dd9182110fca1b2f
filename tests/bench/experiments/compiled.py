"""The cache of compiled code: the first step of a compiled model after a restart, against the first time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import Stage

_SETTINGS = ("prepare.compile=true", "failure.max_restarts=1", "failure.backoff_s=0")


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def restarted() -> Figures:
        folder = stage.new_folder("compiled")
        out = folder / "steps.json"
        options = [word for setting in _SETTINGS for word in ("--set", setting)]
        stage.run(stage.ddptrain("compiled", 2, *options, out=str(out)), env={"XDG_CACHE_HOME": str(folder)})
        first_s, again_s = json.loads(out.read_text())
        return {"first_s": first_s, "again_s": again_s}

    yield {"restarted": restarted}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="compiled",
            unit="s",
            ours=Source("restarted", "again_s"),
            peer=Source("restarted", "first_s"),
            peer_name="the first time",
            goal=Goal("ratio", "<=", 0.4),
            what="first step of a compiled transformer of 4 layers on 2 ranks, after the restart of the ranks",
        ),
    ),
    open=_open,
)
