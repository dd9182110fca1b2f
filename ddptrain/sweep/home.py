"""The run directory of a sweep, in a folder or an object store: a new one, or one to continue."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config.load import load_data
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import describe_value, shorten
from ddptrain.errors import RunLocked, UsageError
from ddptrain.results.checkpoints.verification import metrics_in, parse_manifest, read_manifest
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import MANIFEST, RunLayout, check_run_id, checkpoint_folders, new_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import read_series
from ddptrain.results.remote.checkpoints import CHECKPOINTS
from ddptrain.results.run_record import SWEEP
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, NeededFiles, RunsDir, RunUpload, open_runs_dir
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
    upload: RunUpload
    trials: RunsDir
    where: str

    @property
    def sweep_id(self) -> str:
        """The name of its folder."""
        return self.writer.run_id

    @property
    def folder(self) -> Path:
        """Its run directory; of a store, the working folder."""
        return self.writer.layout.root

    def find_trial(self, run_id: str) -> RunView | None:
        """Return a trial's run; None if it has not begun. Raises StoreError."""
        return self.trials.find_exact(run_id, NeededFiles.METRICS)

    def values(self, view: RunView, metric: str) -> dict[float, float]:
        """Return the values of the metric in a run, by step. Raises StoreError."""
        if isinstance(self.trials, LocalRuns):
            return values_of_run(view, metric, saved_values(view.layout, metric))
        run = self.trials.store.below(view.run_id)
        paths = [path for path in run.files(CHECKPOINTS) if path.endswith(f"/{MANIFEST}") and is_plain(path)]
        manifests = filter(None, map(parse_manifest, run.read_all(paths).values()))
        saved = {float(each["step"]): found.get(metric) for each in manifests if (found := metrics_in(each))}
        return values_of_run(view, metric, {step: value for step, value in saved.items() if value is not None})


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
        with runs.keeping(folder.name, resumed=resume) as upload:
            if resume:
                check_same(folder, resolved)
                writer = RunWriter.reopen(folder, resolved.yaml_text)
            else:
                about = (config.name, resolved.yaml_text, config.workload_name)
                writer = RunWriter.create(folder.parent, folder.name, *about, kind=SWEEP)
            writer.secrets = resolved.secrets
            with writer:
                local = isinstance(runs, LocalRuns)
                where = str(folder) if local else f"{place.rstrip('/')}/{folder.name}"
                yield SweepHome(writer, upload, open_runs_dir(where), where)
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


def _compared(config: object) -> dict[str, Any]:
    data = config if isinstance(config, Mapping) else {}
    flat: dict[str, Any] = {"workload": data.get("workload")}
    for section in ("sweep", "params", "prepare"):
        fields = data.get(section)
        for name, value in fields.items() if isinstance(fields, Mapping) else ():
            if section == "sweep" and name == "space" and isinstance(value, Mapping):
                flat |= {f"sweep.space.{field}": of for field, of in value.items()}
            elif section != "sweep" or name not in _MAY_DIFFER:
                flat[f"{section}.{name}"] = value
    if flat.get("sweep.ranks") is None and isinstance(cluster := data.get("cluster"), Mapping):  # as ranks_of does
        flat["sweep.ranks"] = cluster.get("ranks") if isinstance(cluster.get("ranks"), int) else 1
    return flat


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, Mapping):  # the options that are not given are null
        options = {name: option for name, option in value.items() if option is not None}
        return shorten(json.dumps(options)) if options else ", ".join(value)
    return shorten(json.dumps(value)) if isinstance(value, list) else describe_value(value)


def last_source(runs_dir: str, sweep_id: str | None) -> str:
    """Return the configuration file of the sweep to resume, for a command that names none. Raises UsageError."""
    if is_url(runs_dir):  # whoever can write to the store could name a file of theirs, whose code would run
        raise UsageError(f"name the configuration: ddptrain sweep CONFIG --resume; that in {runs_dir} is not trusted")
    found = find_sweep(runs_dir, choose_sweep(runs_dir, None, sweep_id))
    assert found is not None
    return found.record.source


class LiveMetric:
    """Joins what ranks log to one value a step, as soon as it is complete.

    A step is complete if a checkpoint has the value, if all ranks have logged it, if all those have logged it that
    logged the step before, or if a later step begins. The value is that of the checkpoint, else the mean of the ranks.
    """

    def __init__(self, world_size: int = 0, usual: frozenset[int] = frozenset()) -> None:
        """`usual`: the ranks that log the metric, as an earlier trial has shown; none if that is not known."""
        self.world_size = world_size
        self.usual = usual
        self.last_step: float = -math.inf
        self._step: float | None = None
        self._values: dict[int, float] = {}
        self._counts: dict[int, int] = defaultdict(int)

    def logged(self, rank: int, step: int | None, value: float) -> list[tuple[float, float]]:
        """Add a value that a rank has logged; return the steps that are now complete, with their values."""
        self._counts[rank] += 1
        at = float(self._counts[rank] if step is None else step)
        complete = self._begin(at)
        if at == self._step:
            self._values[rank] = value
            if len(self._values) == self.world_size or (self.usual and self.usual <= self._values.keys()):
                complete += self._complete()
        return complete

    def saved(self, step: int, value: float) -> list[tuple[float, float]]:
        """Add the value of a checkpoint."""
        complete = self._begin(float(step))
        if float(step) == self._step:
            usual, self._values = self.usual, {-1: value}
            complete += self._complete()
            self.usual = usual  # a checkpoint does not say which ranks log
        return complete

    def finish(self) -> list[tuple[float, float]]:
        """Return the steps that are not returned yet, with their values: the run has ended."""
        return self._complete()

    def _begin(self, step: float) -> list[tuple[float, float]]:
        """Begin a later step; an earlier one, which a restart repeats, is ignored."""
        if step <= self.last_step or step == self._step or (self._step is not None and step < self._step):
            return []
        complete = self._complete()
        self._step = step
        return complete

    def _complete(self) -> list[tuple[float, float]]:
        if self._step is None or not self._values:
            return []
        value = sum(self._values.values()) / len(self._values)
        complete = [(self._step, value)]
        self.usual, self.last_step = frozenset(self._values), self._step
        self._step, self._values = None, {}
        return complete


def values_by_step(logged: Iterable[tuple[float, float]], saved: Mapping[float, float]) -> dict[float, float]:
    """Return the value of each step: that of a checkpoint, else the mean of what ranks have logged."""
    found: dict[float, list[float]] = defaultdict(list)
    for step, value in logged:
        found[step].append(value)
    means = {step: sum(values) / len(values) for step, values in found.items()}
    return dict(sorted({**means, **saved}.items()))


def values_of_run(view: RunView, metric: str, saved: Mapping[float, float]) -> dict[float, float]:
    """Return the values of a metric in a run, by step; values that were logged without a step are counted.

    `saved`: step -> the value that its checkpoint has.
    """
    series = read_series(view.layout.metrics_jsonl)
    logged = [
        (float(number if step is None or math.isnan(step) else step), value)
        for (name, _), one in series.items()
        if name == metric
        for number, (step, value) in enumerate(zip(one.step, one.value, strict=True), 1)
    ]
    best = view.record.best
    known = {float(best.step): best.value} if best is not None and best.metric == metric else {}
    return values_by_step(logged, {**saved, **known})


def saved_values(layout: RunLayout, metric: str) -> dict[float, float]:
    """Return the values of a metric in the checkpoints of a run directory, by step."""
    saved: dict[float, float] = {}
    for folder in checkpoint_folders(layout):
        with suppress(ResultsError):
            manifest = read_manifest(folder)
            if metric in manifest.metrics:
                saved[float(manifest.step)] = manifest.metrics[metric]
    return saved


def best_value(values: Iterable[float], mode: str) -> float | None:
    """Return the lowest (mode min) or highest finite value; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite) if mode == "min" else max(finite)) if finite else None
