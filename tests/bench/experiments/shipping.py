"""Upload of 20 MB of code in 2,000 files to four workers that cannot see it: the first time, and unchanged."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.bench.experiments.first_step import warm_cluster
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_WORKERS = 4
_FILES, _FILE_BYTES = 2_000, 10_000


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise BenchError("hiding a folder from workers needs root and mount namespaces")
    project, cache = stage.new_folder("project"), stage.new_folder("cache")
    hide = f'mount -t tmpfs none {project} && export XDG_CACHE_HOME={cache} && exec "$@"'
    hidden = ["unshare", "--mount", "bash", "-c", hide, "-", stage.python, "-m", "ddptrain.worker", "--slots", "1"]
    with ExitStack() as stack:
        _, address = stack.enter_context(warm_cluster(stage, 1, with_worker=False))
        for _ in range(_WORKERS):
            stack.enter_context(stage.started([*hidden, "--scheduler", address]))

        def shipped() -> Figures:
            draw = random.Random()
            for number in range(_FILES):
                file = project / f"part-{number % 20}" / f"file-{number}.py"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(draw.randbytes(_FILE_BYTES))
            program = str(stage.programs / "ship.py")
            done = stage.run([stage.python, program, address, str(project), str(_WORKERS)])
            figures: Figures = json.loads(done.stdout)
            return figures

        yield {"shipped": shipped}


EXPERIMENT = Experiment(
    rows=(
        Row(
            name="ship-again",
            unit="s",
            ours=Source("shipped", "again_s"),
            peer=Source("shipped", "first_s"),
            peer_name="the first time",
            goal=Goal("ours", "<=", 0.3),
            what="listing, hashing and asking for 20 MB in 2,000 files on 4 workers that don't see them, unchanged",
        ),
    ),
    open=_open,
)
