"""The study: Optuna chooses points and ends trials early. It is rebuilt from the record of the sweep."""

from __future__ import annotations

import inspect
import itertools
import json
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState as OptunaState

from ddptrain.config.sections.sweeping import Distribution, SweepConfig, values_of
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.log import Log
from ddptrain.results.sweep_record import TrialRecord, TrialState

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler"}
_PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "asha": "SuccessiveHalvingPruner"}
# Left out: base classes, samplers that end Optuna's own loop, and samplers that wrap another one.
_NOT_SAMPLERS = frozenset({"BaseSampler", "BaseGASampler", "GridSampler", "BruteForceSampler", "PartialFixedSampler"})
_NOT_PRUNERS = frozenset({"BasePruner"})
# The pruner counts the values of the metric: 1 is the first one.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TPESampler": {"constant_liar": True},  # trials that run at the same time do not try the same point
    "SuccessiveHalvingPruner": {"min_resource": 1, "reduction_factor": 3},
    "PatientPruner": {"wrapped_pruner": None},
}
_FINAL = {
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}
_log = Log(__name__)


class Study:
    """The points of a sweep and their results. Threads may share it.

    Raises UsageError for a sampler or pruner that does not exist, or does not take its options.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        trials: Sequence[TrialRecord] = (),
        values_of_trial: Callable[[TrialRecord], Sequence[float]] = lambda trial: (),
    ) -> None:
        """trials: those of earlier drivers, in the order of their numbers.

        values_of_trial: returns the values of the metric that a trial has had so far, which the pruner compares.
        """
        _silence_optuna()
        self._sweep = sweep
        self._mutex = threading.RLock()
        self._distributions = {name: _distribution(space) for name, space in sweep.space.items()}
        # A sampler with the same seed would repeat its points after a resume.
        self._study = optuna.create_study(
            direction="minimize" if sweep.mode == "min" else "maximize",
            sampler=make_sampler(sweep, len(trials)),
            pruner=make_pruner(sweep),
        )
        self._trials: list[optuna.Trial] = []
        self._reported: dict[int, int] = {}  # trial -> the number of values that the pruner knows
        self._pruned: set[int] = set()
        self._tried = [_encoded(sweep.space, trial.params) for trial in trials] if sweep.searcher == "grid" else []
        for record in trials:
            self._study.enqueue_trial(_encoded(sweep.space, record.params))
            trial = self._study.ask(self._distributions)
            self._trials.append(trial)
            for index, value in enumerate(values_of_trial(record) if sweep.pruner != "none" else (), 1):
                self.report(trial.number, index, value)
            if record.state.is_final:
                self.tell(record)

    def ask(self) -> TrialRecord:
        """Choose the next point. Raises UsageError if the sampler fails."""
        with self._mutex:
            if self._sweep.searcher == "grid":
                point = next(point for point in _grid_points(self._sweep) if point not in self._tried)
                self._tried.append(point)
                self._study.enqueue_trial(point)
            try:
                trial = self._study.ask(self._distributions)
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                name = self._sweep.searcher
                raise UsageError(f"sweep.search: {name} can't choose a point: {one_line(error)}") from error
            self._trials.append(trial)
            _log.info("point chosen", trial=trial.number, params=trial.params)
            return TrialRecord(trial.number, self._decoded(trial.params))

    def report(self, number: int, index: int, value: float) -> bool:
        """Add a value of the metric of a trial; return whether to end it.

        `index` counts its values from 1; one that is known is ignored, and what was decided then is the answer.
        """
        with self._mutex:
            if index > self._reported.get(number, 0):
                self._reported[number] = index
                trial = self._trials[number]
                trial.report(value, index)
                if trial.should_prune():
                    self._pruned.add(number)
                _log.info("value reported", trial=number, index=index, value=value, prune=number in self._pruned)
            return number in self._pruned

    def tell(self, record: TrialRecord) -> None:
        """Add the result of a trial."""
        with self._mutex:
            value = record.value if record.state is TrialState.COMPLETE else None
            self._study.tell(self._trials[record.number], value, state=_FINAL[record.state])

    def _decoded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a point in the order of the space, as the configuration has them."""
        space = self._sweep.space
        return {name: each[params[name]] if isinstance(each, list) else params[name] for name, each in space.items()}


def _encoded(space: Mapping[str, Distribution | list[Any]], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point for Optuna: of a value of a list its index, because Optuna takes no lists and mappings."""
    encoded = dict(point)
    for name, each in space.items():
        if isinstance(each, list):
            texts = [json.dumps(value, sort_keys=True, default=str) for value in each]
            encoded[name] = texts.index(json.dumps(point[name], sort_keys=True, default=str))
    return encoded


def check_choice(sweep: SweepConfig) -> None:
    """Raise UsageError for a sampler or pruner that does not exist, or does not take its options."""
    _silence_optuna()
    make_sampler(sweep, 0)
    make_pruner(sweep)


def _silence_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.filterwarnings("ignore", module="optuna")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def make_sampler(sweep: SweepConfig, n_before: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of a sweep; after a resume, with `n_before` trials, it chooses other points.

    Raises UsageError.
    """
    name, options = next(iter(sweep.search.items()))
    kind = _named("search", name, _SAMPLERS, optuna.samplers, "Sampler", _NOT_SAMPLERS)
    given = dict(options or {})
    if "seed" in inspect.signature(kind).parameters and isinstance(given.setdefault("seed", 0), int):
        given["seed"] += n_before
    sampler: optuna.samplers.BaseSampler = _made("search", name, kind, given)
    return sampler


def make_pruner(sweep: SweepConfig) -> optuna.pruners.BasePruner:
    """Return the pruner of a sweep. Raises UsageError."""
    name, options = next(iter(sweep.prune.items()))
    kind = _named("prune", name, _PRUNERS, optuna.pruners, "Pruner", _NOT_PRUNERS)
    pruner: optuna.pruners.BasePruner = _made("prune", name, kind, options or {})
    return pruner


def _named(field: str, name: str, own: Mapping[str, str], module: Any, suffix: str, refused: frozenset[str]) -> Any:
    classes = {each.lower(): each for each in dir(module) if each.endswith(suffix) and each not in refused}
    cls = own.get(name) or classes.get(name.lower()) or classes.get(f"{name.lower()}{suffix.lower()}")
    if cls is None:
        known = sorted({*own, *(each.removesuffix(suffix.lower()) for each in classes)})
        raise UsageError(f"sweep.{field}: there is no {suffix.lower()} {shorten(name)}; {did_you_mean(name, known)}")
    return getattr(module, cls)


def _made(field: str, name: str, kind: Any, options: Mapping[str, Any]) -> Any:
    try:
        return kind(**{**_DEFAULTS.get(kind.__name__, {}), **options})
    except (TypeError, ValueError, ImportError) as error:
        text = one_line(error).replace(f"{kind.__name__}.__init__()", kind.__name__)
        raise UsageError(
            f"sweep.{field}: {name}: {text}; options are written as {{{name}: {{OPTION: VALUE}}}}"
        ) from error


def _grid_points(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """Yield the points of a grid in the order of their trials; the first two differ in the last field.

    With a pruner the order is random: a pruner compares a trial with earlier ones, and if each point were a little
    better than the one before, no trial would end early.
    """
    values = [values_of(space) or [] for space in sweep.space.values()]
    points = [_encoded(sweep.space, dict(zip(sweep.space, each, strict=True))) for each in itertools.product(*values)]
    yield from points if sweep.pruner == "none" else random.Random(0).sample(points, len(points))


def _distribution(space: Distribution | list[Any]) -> BaseDistribution:
    if isinstance(space, list):
        return CategoricalDistribution(range(len(space)))
    low, high = space.limits
    is_log = space.kind.startswith("log")
    if space.is_whole:
        return IntDistribution(int(low), int(high), log=is_log, step=int(space.step or 1))
    return FloatDistribution(low, high, log=is_log, step=space.step)
