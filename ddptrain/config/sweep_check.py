"""Checks the section `sweep` against the parameters of the workload: every limit and value must be valid there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ddptrain.config.params_check import check_params
from ddptrain.config.run_config import PrepareConfig, RunConfig
from ddptrain.config.sections.sweeping import SweepConfig, samples_of, values_of
from ddptrain.config.wording import describe_value, did_you_mean, shorten
from ddptrain.config.yaml_reader import Document
from ddptrain.errors import Problem
from ddptrain.secret_rules import is_secret_name

_MOST_SAMPLES = 100  # of a field; each is checked with the model of the params


def first_values(section: object, model: type[BaseModel] | None) -> dict[str, Any]:
    """Return the first value of each known parameter that a section `sweep` searches; none if it has problems."""
    try:
        sweep = SweepConfig.model_validate(section)
    except ValidationError:
        return {}
    named = ((name.partition("."), space) for name, space in sweep.space.items())
    return {
        key: samples_of(space)[0]
        for (first, _, key), space in named
        if first == "params" and "." not in key and not (model and _is_unknown(model, key))
    }


def sweep_problems(config: RunConfig, model: type[BaseModel] | None, document: Document) -> Iterator[Problem]:
    """Yield the problems of the section `sweep`; `model` is that of the workload's params, if it is known."""
    sweep = config.sweep
    if sweep is None:
        return
    for name, space in sweep.space.items():
        problem = _space_problem(config, model, name, samples_of(space)[:_MOST_SAMPLES]) or _grid_problem(sweep, name)
        if problem is not None:
            where = document.where(("sweep", "space", name))
            yield Problem(where, f"sweep.space.{shorten(name)}", *problem)
    if sweep.seeds > 1 and "seed" not in (_names(model) if model else config.params):
        message = f"is {sweep.seeds}, but {shorten(config.workload_name)} has no parameter seed to vary"
        yield document.problem(("sweep", "seeds"), message, "leave it out, or add params.seed")


def _grid_problem(sweep: SweepConfig, name: str) -> tuple[str, str] | None:
    if sweep.searcher != "grid" or values_of(sweep.space[name]) is not None:
        return None
    return "has no list of values, which search: grid needs", "write a list of values, or a step"


def _space_problem(
    config: RunConfig, model: type[BaseModel] | None, name: str, samples: list[Any]
) -> tuple[str, str] | None:
    """Return why a field can't take its values: a message and a hint."""
    section, _, key = name.partition(".")
    if is_secret_name(key.rpartition(".")[2]):
        return "has the name of a secret, and sweep.json shows all values", "leave it out, or rename it"
    if section == "params":
        if config.script is not None:
            return "is given, but the workload is a script", f"write args.{key}, which becomes --{key} VALUE"
        return _wrong_value(model, config.params, key, samples) if model is not None else None
    if section == "args":
        hint = f"write params.{key}"
        return None if config.script is not None else ("is given, but the workload is not a script", hint)
    if section == "prepare":
        return _wrong_value(PrepareConfig, config.prepare.model_dump(), key, samples)
    texts = all(isinstance(value, str) for value in samples)
    return None if texts else ("expected text for an environment variable", "write a list of texts in quotes")


def _wrong_value(
    model: type[BaseModel], values: Mapping[str, Any], key: str, samples: list[Any]
) -> tuple[str, str] | None:
    first = key.partition(".")[0]
    if _is_unknown(model, first):
        return "there is no such parameter", did_you_mean(first, _names(model))
    if "." in key:
        return None  # the trials check it
    for value in samples:
        try:
            check_params(model, {**values, key: value})
        except ValidationError as error:
            for details in error.errors(include_url=False):
                if details["loc"][:1] == (key,):
                    return f"{describe_value(value, (key,))} is not possible: {details['msg']}", "change the values"
    return None


def _is_unknown(model: type[BaseModel], name: str) -> bool:
    return name not in _names(model) and model.model_config.get("extra") == "forbid"


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
