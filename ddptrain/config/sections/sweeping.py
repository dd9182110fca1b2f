"""The section `sweep`, which `ddptrain sweep` reads: the search space, and how it is searched."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from ddptrain.config.sections.retraining import Positive
from ddptrain.config.types import FilledText, Ranks, Strict, wrong_field
from ddptrain.config.wording import describe_value

_MOST_VALUES = 10_000
PREFIXES = ("params.", "prepare.", "env.", "args.")
Kind = Literal["uniform", "log", "int", "log_int"]
_KINDS: tuple[Kind, ...] = ("uniform", "log", "int", "log_int")
_ELSEWHERE = {"loguniform": "log", "log_uniform": "log", "randint": "int", "lograndint": "log_int"}
Limits = Annotated[list[float], Field(min_length=2, max_length=2)]
Options = dict[str, dict[str, Any] | None]


class Distribution(Strict):
    """An interval from which values are drawn: one of uniform, log, int and log_int, as {log: [1e-4, 1e-1]}."""

    uniform: Limits | None = Field(default=None, description="Any number between two limits.")
    log: Limits | None = Field(default=None, description="The same, with an even distribution of the logarithm.")
    int: Limits | None = Field(default=None, description="Any whole number between two limits, both included.")
    log_int: Limits | None = Field(default=None, description="The same, with an even distribution of the logarithm.")
    step: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Distance between two values of uniform or int; null for any."
    )

    @property
    def kind(self) -> Kind:
        """Which of the four fields is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value, as int for whole numbers."""
        low, high = getattr(self, self.kind)
        return (round(low), round(high)) if self.is_whole else (low, high)

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return self.kind in ("int", "log_int")

    def values(self) -> list[float] | None:
        """Return all values, None if there are too many to list."""
        low, high = self.limits
        step = self.step or (1 if self.kind == "int" else None)
        if step is None or (high - low) / step > _MOST_VALUES:
            return None
        count = math.floor((high - low) / step + 1e-9) + 1
        values = [low + number * step for number in range(count)]
        return [round(value) for value in values] if self.is_whole else [float(f"{value:.12g}") for value in values]

    @model_validator(mode="before")
    @classmethod
    def _kind_is_ours(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if ours := _ELSEWHERE.get(name):
                raise wrong_field(name, "is a name of other tools", f"write {ours}")
        return data

    @model_validator(mode="after")
    def _limits_and_step_fit(self) -> Self:
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            got = " and ".join(kinds) if kinds else "none of them"
            raise wrong_field("", f"expected one of {', '.join(_KINDS)}, got {got}", "as in {log: [0.0001, 0.1]}")
        name = self.kind
        low, high = getattr(self, name)
        if not low < high:
            raise wrong_field(name, f"the first limit is {low:g}, the second {high:g}", "write the lower one first")
        if name.startswith("log") and low <= 0:
            raise wrong_field(name, f"the lower limit is {low:g}, and has no logarithm", "write a number above 0")
        if self.is_whole and not (float(low).is_integer() and float(high).is_integer()):
            raise wrong_field(name, f"the limits {low:g} and {high:g} are not whole numbers", "write uniform or log")
        if self.step is None:
            return self
        if name.startswith("log"):
            raise wrong_field("step", f"is given, but {name} has none", "leave it out")
        if self.is_whole and not self.step.is_integer():
            raise wrong_field("step", f"is {self.step:g}, but {name} has whole numbers", "write a whole number")
        if self.step > high - low:
            raise wrong_field("step", f"is {self.step:g}, more than the distance of the limits", "write a smaller one")
        return self


def _choices(values: object) -> object:
    if isinstance(values, list):
        texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
        twice = [value for number, value in enumerate(values) if texts[number] in texts[:number]]
        if twice:
            raise wrong_field("", f"{describe_value(twice[0])} is listed twice", "leave one of them out")
    return values


# A list of values, or an interval. The kind is determined first, so that an error mentions only one of them.
Space = Annotated[
    Annotated[Distribution, Tag("interval")]
    | Annotated[list[Any], Field(min_length=1, max_length=_MOST_VALUES), BeforeValidator(_choices), Tag("values")],
    Discriminator(lambda value: "values" if isinstance(value, list) else "interval"),
]


def _space_name(name: str) -> str:
    if not name.startswith(PREFIXES) or not all(name.split(".")):
        param = "NAME" if "." in name else name
        hint = f"write params.{param}; prepare.NAME, env.NAME and, for a script, args.NAME are possible, too"
        raise wrong_field("", "this field can't be searched", hint)
    return name


def _as_option(value: object) -> object:
    return {value: None} if isinstance(value, str) else value


Method = Annotated[
    Annotated[Options, Field(min_length=1, max_length=1)],
    BeforeValidator(_as_option, json_schema_input_type=str | Options),
]


class SweepConfig(Strict):
    """A search for the best values of some fields: `ddptrain sweep`."""

    space: Annotated[dict[Annotated[str, AfterValidator(_space_name)], Space], Field(min_length=1)] = Field(
        description="Fields and their values: a list, or one of {uniform: [a, b]}, {log: [a, b]}, {int: [a, b]}, "
        "{log_int: [a, b]}. Fields are params.NAME, prepare.NAME, env.NAME and, for a script, args.NAME (--NAME VALUE)."
    )
    trials: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="Number of points to try; null for no limit, or for all points of a grid."
    )
    for_: Positive | None = Field(
        default=None, alias="for", description='Time after which no trial begins any more, as "2h"; null for no limit.'
    )
    search: Method = Field(
        default={"tpe": None},
        description="How points are chosen: grid, random, tpe, or another sampler of Optuna by name, except "
        "cmaes, which loads pickles; "
        "{tpe: {n_startup_trials: 5}} passes options on.",
    )
    prune: Method = Field(
        default={"none": None},
        description="How trials are ended early: none, median, asha, or another pruner of Optuna by name; it counts "
        "the values of the metric. {asha: {reduction_factor: 4}} passes options on.",
    )
    metric: FilledText = Field(default="val/loss", description="The logged metric that is compared: its best value.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether the lowest or the highest value is best.")
    ranks: Ranks | None = Field(
        default=None, description="Ranks of a trial; null is cluster.ranks if that is a number, else 1."
    )
    parallel: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] = Field(
        default="auto", description="Trials at the same time; auto is as many as there are free slots."
    )

    @property
    def searcher(self) -> str:
        """The name of the sampler."""
        return next(iter(self.search))

    @property
    def pruner(self) -> str:
        """The name of the pruner."""
        return next(iter(self.prune))

    @property
    def grid_size(self) -> int | None:
        """The number of points of a grid; None for another search, and if a field has no list of values."""
        if self.searcher != "grid":
            return None
        counts = [len(values) for each in self.space.values() if (values := values_of(each)) is not None]
        return math.prod(counts) if len(counts) == len(self.space) else None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.searcher != "grid" and self.trials is None and self.for_ is None:
            raise wrong_field("trials", "is required, and not given", "write trials: 32, or for: 2h")
        return self


def values_of(space: Distribution | list[Any]) -> list[Any] | None:
    """Return all values of a field, None if there are too many to list."""
    return space if isinstance(space, list) else space.values()


def samples_of(space: Distribution | list[Any]) -> list[Any]:
    """Return the values that must all be valid: those of a list, or the limits."""
    return space if isinstance(space, list) else list(space.limits)
