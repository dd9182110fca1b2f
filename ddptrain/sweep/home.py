"""The run directory of a sweep, in a folder or an object store: a new one, or one to continue."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config.load import load_data
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import RunLocked, UsageError
from ddptrain.results.checkpoints.verification import metrics_in, parse_manifest
from ddptrain.results.layout import MANIFEST, check_run_id, checkpoint_folders, new_run_id
from ddptrain.results.metrics import read_series
from ddptrain.results.remote.checkpoints import CHECKPOINTS
from ddptrain.results.remote.stored_runs import StoredRun
from ddptrain.results.run import Run
from ddptrain.results.run_record import SWEEP
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, Runs, open_runs_dir
from ddptrain.results.secure_files import read_bytes
from ddptrain.results.sweep_record import choose_sweep, find_sweep
from ddptrain.storage.store import is_plain, is_url

BEST = "best.yaml"
# What may differ when a sweep is resumed: how long it takes, and how many trials run at the same time.
_MAY_DIFFER = frozenset({"trials", "for", "parallel", "prune"})


@dataclass(frozen=True, slots=True)
class SweepHome:
    """A sweep that this process drives. trials: the runs below it. where: its folder or URL, which holds them."""

    writer: RunWriter
    trials: Runs
    where: str

    @property
    def sweep_id(self) -> str:
        """The name of its folder."""
        return self.writer.run_id

    @property
    def folder(self) -> Path:
        """Its run directory; of a store, the working folder."""
        return self.writer.layout.root

    def values(self, view: Run, metric: str) -> dict[float, float]:
        """Return the values of a metric in a run, by step: that of a checkpoint, else the mean of the ranks.

        Values that were logged without a step are counted. Raises StoreError.
        """
        logged: dict[float, list[float]] = defaultdict(list)
        for (name, _), one in read_series(view.metrics_jsonl).items():
            for number, (step, value) in enumerate(zip(one.step, one.value, strict=True), 1):
                if name == metric:
                    logged[float(number if step is None or math.isnan(step) else step)].append(value)
        found = {step: sum(values) / len(values) for step, values in logged.items()}
        if not isinstance(view, StoredRun):
            texts = [folder / MANIFEST for folder in checkpoint_folders(view.checkpoints_dir)]
            contents = [path.read_bytes() for path in texts if path.is_file()]
        else:
            run = view.store
            paths = [path for path in run.files(CHECKPOINTS) if path.endswith(f"/{MANIFEST}") and is_plain(path)]
            contents = list(run.read_all(paths).values())
        for manifest in filter(None, map(parse_manifest, contents)):
            if (saved := (metrics_in(manifest) or {}).get(metric)) is not None:
                found[float(manifest["step"])] = saved
        best = view.record.best
        if best is not None and best.metric == metric:
            found[float(best.step)] = best.value
        return dict(sorted(found.items()))


@contextmanager
def opened(resolved: ResolvedConfig, sweep_id: str | None, *, resume: bool) -> Iterator[SweepHome]:
    """Begin a sweep, or continue one: the newest of this name, or that of the id. Its lock is held for the block.

    Raises RunNotFound, UsageError, RunLocked, StoreError, ResultsError.
    """
    config = resolved.config
    place = config.results.dir
    runs = open_runs_dir(place)
    if resume:
        sweep_id = choose_sweep(place, config.name, sweep_id)
    elif sweep_id is not None:
        check_run_id(sweep_id)
        if find_sweep(place, sweep_id) is not None:
            raise UsageError(f"{place}/{sweep_id} exists already; continue it with --resume")
    try:
        folder = runs.folder.absolute() / (sweep_id or new_run_id(config.name))
        with runs.claim(folder.name, resumed=resume) as upload:
            if resume:
                check_same(folder, resolved)
                writer = RunWriter.reopen(folder, resolved.yaml_text)
            else:
                about = (config.name, resolved.yaml_text, config.workload_name)
                writer = RunWriter.create(folder.parent, folder.name, *about, kind=SWEEP)
            writer.secrets, writer.upload = resolved.secrets, upload
            with writer:
                local = isinstance(runs, LocalRuns)
                where = str(folder) if local else f"{place.rstrip('/')}/{folder.name}"
                yield SweepHome(writer, open_runs_dir(where), where)
    except RunLocked as error:
        raise RunLocked(str(error).replace("--run-id", "--sweep-id").replace("run ", "sweep ", 1)) from error


def check_same(folder: Path, resolved: ResolvedConfig) -> None:
    """Raise UsageError, with the differences, if the configuration is not the one of the sweep to resume."""
    path = folder / "config.yaml"
    try:
        before = load_data(read_bytes(path), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; begin a new sweep") from error
    was, now = _compared(before), _compared(resolved.recorded)
    changes = [
        f"\n  {name}: was {_shown(was.get(name))}, is {_shown(now.get(name))}"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    if changes:
        text = "".join(changes[:20])
        raise UsageError(f"sweep {folder.name} has other settings; begin a new sweep, or undo the changes:{text}")


def _compared(config: Any) -> dict[str, Any]:
    """Return what must be the same, by the name of the field."""
    flat: dict[str, Any] = {"workload": config.get("workload")}
    for section in ("sweep", "params", "prepare"):
        flat |= {f"{section}.{name}": value for name, value in (config.get(section) or {}).items()}
    flat |= {f"sweep.space.{name}": of for name, of in flat.pop("sweep.space", {}).items()}
    for name in _MAY_DIFFER:
        flat.pop(f"sweep.{name}", None)
    if flat.get("sweep.ranks") is None:  # as ranks_of does
        ranks = config.get("cluster", {}).get("ranks")
        flat["sweep.ranks"] = ranks if isinstance(ranks, int) else 1
    return flat


def _shown(value: object) -> str:
    if isinstance(value, Mapping):  # the options that are not given are null
        value = {name: option for name, option in value.items() if option is not None} or next(iter(value))
    return "not set" if value is None else shorten(json.dumps(value))


def last_source(runs_dir: str, sweep_id: str | None) -> str:
    """Return the configuration file of the sweep to resume, for a command that names none. Raises UsageError."""
    if is_url(runs_dir):  # whoever can write to the store could name a file of theirs, whose code would run
        raise UsageError(f"name the configuration: ddptrain sweep CONFIG --resume; that in {runs_dir} is not trusted")
    found = find_sweep(runs_dir, choose_sweep(runs_dir, None, sweep_id))
    assert found is not None
    return found.record.source
