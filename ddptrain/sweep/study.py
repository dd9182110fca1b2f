"""The study: Optuna chooses points and ends trials early. Its journal is the memory of a sweep."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC as _UTC
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from ddptrain.config.sections.sweeping import Distribution, SweepConfig, values_of
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.log import Log
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.secure_files import open_to_append
from ddptrain.sweep.records import TrialRecord, TrialState

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler"}
_PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "asha": "SuccessiveHalvingPruner"}
# Left out: base classes, samplers that end Optuna's own loop, and samplers that wrap another one.
# CmaEsSampler loads a pickle from the journal, which would run the code of whoever can write it.
_NOT_SAMPLERS = frozenset(
    {"BaseSampler", "BaseGASampler", "GridSampler", "BruteForceSampler", "PartialFixedSampler", "CmaEsSampler"}
)
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
_RESULT = ("values", "step", "error", "value", "spread", "duration_s", "run_ids")
_GRID_POINT = "grid_point"  # the attribute of a trial that has the number of its point in the grid
_PRUNED = "pruned"  # the attribute of a trial that is to be ended early
_IMPORTANCE_TRIALS = 2  # complete ones, at least
_log = Log(__name__)


class _NoLock(JournalFileOpenLock):
    """Replaces Optuna's lock file, which a killed driver would leave behind. _mutex orders this driver's threads."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Study:
    """The points of a sweep and their results. Threads may share it.

    Raises UsageError for a sampler or pruner that does not exist, or does not take its options; ResultsError if the
    journal can't be read or written.
    """

    def __init__(self, journal: Path, sweep: SweepConfig) -> None:
        _silence_optuna()
        self._sweep = sweep
        self._mutex = threading.RLock()
        self._distributions = {name: _distribution(space) for name, space in sweep.space.items()}
        _remove_half_line(journal)
        with self._naming(journal):
            self._storage = JournalStorage(JournalFileBackend(str(journal), lock_obj=_NoLock(str(journal))))
            self._study = optuna.create_study(
                storage=self._storage,
                study_name="sweep",
                load_if_exists=True,
                direction="minimize" if sweep.mode == "min" else "maximize",
                pruner=make_pruner(sweep),
            )
            # A sampler with the same seed would repeat its points after a resume.
            self._study.sampler = make_sampler(sweep, sweep.seed + len(self._frozen()))
            self._journal = journal
            self._grid_order = _grid_order(sweep)
            self._asked: dict[int, optuna.Trial] = {}
            self._complete_points()

    @property
    def size(self) -> int:
        """The number of points that were chosen."""
        with self._mutex:
            return sum(trial.state != OptunaState.WAITING for trial in self._frozen())

    def ask(self) -> TrialRecord:
        """Choose the next point. Raises UsageError if the sampler fails, ResultsError."""
        with self._mutex, self._naming(self._journal):
            if self._sweep.searcher == "grid" and not any(t.state == OptunaState.WAITING for t in self._frozen()):
                self._enqueue_grid_point()
            try:
                trial = self._study.ask(self._distributions)
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                name = self._sweep.searcher
                raise UsageError(f"sweep.search: {name} can't choose a point: {one_line(error)}") from error
            self._asked[trial.number] = trial
            _log.info("point chosen", trial=trial.number, params=trial.params)
            return TrialRecord(trial.number, self._decoded(trial.params))

    def report(self, number: int, index: int, value: float) -> bool:
        """Add a value of the metric of a running trial; return whether to end it.

        `index` counts its values from 1; one that is known is ignored, and what was decided then is the answer.
        """
        with self._mutex, self._naming(self._journal):
            trial, known = self._trial(number), self._frozen_trial(number)
            if index in known.intermediate_values:
                return _PRUNED in known.user_attrs
            trial.report(value, index)
            ends = trial.should_prune()
            if ends:
                trial.set_user_attr(_PRUNED, True)
            _log.info("value reported", trial=number, index=index, value=value, prune=ends)
            return ends

    def tell(self, record: TrialRecord) -> None:
        """Record the result of a trial; a trial that has one is not changed. Raises ResultsError."""
        with self._mutex, self._naming(self._journal):
            if self._frozen_trial(record.number).state.is_finished():
                return
            result = {name: getattr(record, name) for name in _RESULT}
            self._trial(record.number).set_user_attr("result", result)  # one line of the journal
            value = record.value if record.state is TrialState.COMPLETE else None
            self._study.tell(record.number, value, state=_FINAL[record.state])
            self._asked.pop(record.number, None)

    def records(self) -> list[TrialRecord]:
        """Return all trials, as the journal has them; one without a result is interrupted."""
        with self._mutex:
            return [self._record(trial) for trial in self._frozen() if trial.state != OptunaState.WAITING]

    def importance(self) -> dict[str, float] | None:
        """Return the importance of each field for the metric, as shares of 1; None if it cannot be computed."""
        with self._mutex:
            complete = [trial for trial in self._frozen() if trial.state == OptunaState.COMPLETE]
            varied = [
                name for name in self._distributions if len({str(trial.params.get(name)) for trial in complete}) > 1
            ]
            if len(complete) < _IMPORTANCE_TRIALS or len({trial.value for trial in complete}) < 2 or not varied:
                return None
            importance = _importance_module()
            # Of the better half: of the best tenth, its default, 20 trials have two.
            evaluator = importance.PedAnovaImportanceEvaluator(target_quantile=0.5)
            try:
                found = importance.get_param_importances(self._study, evaluator=evaluator, params=varied)
            except (ValueError, RuntimeError, ArithmeticError) as error:  # too few trials for this evaluator
                _log.info("importance is not known", reason=one_line(error))
                return None
            shares = {**dict.fromkeys(self._distributions, 0.0), **found}
            return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        states = {optunas: ours for ours, optunas in _FINAL.items()}
        result = trial.user_attrs.get("result", {})
        started, ended = trial.datetime_start, trial.datetime_complete
        return TrialRecord(
            trial.number,
            self._decoded(trial.params),
            states.get(trial.state, TrialState.INTERRUPTED),
            result.get("value"),
            list(result.get("values", [])),
            result.get("spread"),
            result.get("step"),
            str(result.get("error", "")),
            list(result.get("run_ids", [])),
            started_at=_utc(started) or "",
            ended_at=_utc(ended),
            duration_s=result.get("duration_s"),
        )

    def _complete_points(self) -> None:
        """Choose the values that points lack: a driver was killed between two lines of the journal."""
        for trial in self._frozen():
            if trial.state == OptunaState.RUNNING and self._distributions.keys() - trial.params.keys():
                for name, distribution in self._distributions.items():
                    self._trial(trial.number)._suggest(name, distribution)  # noqa: SLF001  # as Study.ask does
                _log.info("point completed", trial=trial.number)

    def _enqueue_grid_point(self) -> None:
        """Queue the first point of the grid that no trial has used for the next trial."""
        tried = {trial.user_attrs.get(_GRID_POINT, trial.number) for trial in self._frozen()}
        index = next(each for each in self._grid_order if each not in tried)
        values = [values_of(space) or [] for space in self._sweep.space.values()]
        point = next(itertools.islice(itertools.product(*values), index, None))
        encoded = {name: _encoded(value) for name, value in zip(self._sweep.space, point, strict=True)}
        self._study.enqueue_trial(encoded, user_attrs={_GRID_POINT: index})

    def _decoded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a point in the order of the space, as the configuration has them."""
        decoded = {}
        for name, space in self._sweep.space.items():
            value = params[name]
            if isinstance(space, list):
                value = next(
                    (each for each in space if _encoded(each) == value and type(_encoded(each)) is type(value)), value
                )
            decoded[name] = value
        return decoded

    def _trial(self, number: int) -> optuna.Trial:
        if number not in self._asked:  # of an earlier driver
            self._asked[number] = optuna.Trial(self._study, self._frozen_trial(number)._trial_id)  # noqa: SLF001  # it has no public name
        return self._asked[number]

    def _frozen(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen_trial(self, number: int) -> FrozenTrial:
        return self._frozen()[number]

    @contextmanager
    def _naming(self, journal: Path) -> Iterator[None]:
        """Convert errors of the journal to ResultsError."""
        try:
            with results_errors(journal):
                yield
        except (KeyError, json.JSONDecodeError) as error:
            raise ResultsError(f"{journal} is damaged: {one_line(error)}; begin a new sweep") from error


def _importance_module() -> Any:
    """Import optuna.importance without scikit-learn, which takes a second and is for evaluators not used here."""
    hidden = "sklearn" not in sys.modules
    if hidden:
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # its import fails, which Optuna allows for
    try:
        return importlib.import_module("optuna.importance")
    finally:
        if hidden:
            del sys.modules["sklearn"]


def check_choice(sweep: SweepConfig) -> None:
    """Raise UsageError for a sampler or pruner that does not exist, or does not take its options."""
    _silence_optuna()
    make_sampler(sweep, sweep.seed)
    make_pruner(sweep)


def _silence_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.filterwarnings("ignore", module="optuna")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def make_sampler(sweep: SweepConfig, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of a sweep. Raises UsageError."""
    name, options = next(iter(sweep.search.items()))
    kind = _named("search", name, _SAMPLERS, optuna.samplers, "Sampler", _NOT_SAMPLERS)
    seeded = {"seed": seed} if "seed" in inspect.signature(kind).parameters else {}
    sampler: optuna.samplers.BaseSampler = _made("search", name, kind, {**seeded, **(options or {})})
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


def _grid_order(sweep: SweepConfig) -> Sequence[int]:
    """Return the numbers of a grid's points in the order of their trials; points 0 and 1 differ in the last field.

    With a pruner the order is random: a pruner compares a trial with earlier ones, and if each point were a little
    better than the one before, no trial would end early.
    """
    order = range(sweep.grid_size or 0)
    return order if sweep.pruner == "none" else random.Random(sweep.seed).sample(order, len(order))


def _distribution(space: Distribution | list[Any]) -> BaseDistribution:
    if isinstance(space, list):
        return CategoricalDistribution([_encoded(value) for value in space])
    low, high = space.limits
    is_log = space.kind.startswith("log")
    if space.is_whole:
        return IntDistribution(int(low), int(high), log=is_log, step=int(space.step or 1))
    return FloatDistribution(low, high, log=is_log, step=space.step)


def _encoded(value: Any) -> Any:
    """Return a value of a list as Optuna takes it: lists and mappings are JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _utc(time: Any) -> str | None:
    return (
        None
        if time is None
        else time.astimezone().astimezone(_UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _remove_half_line(journal: Path) -> None:
    """Remove the end of the journal if its driver was killed while it wrote it. Raises ResultsError."""
    descriptor = open_to_append(journal)
    try:
        data = journal.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            _log.info("half a line of the journal removed", bytes=len(data) - complete)
            os.ftruncate(descriptor, complete)
    finally:
        os.close(descriptor)
