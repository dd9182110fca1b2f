"""Loads a configuration from a YAML file and --set options; an error lists all problems."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ddptrain.config.config_file import decode, find_config, read_text
from ddptrain.config.plugin_names import check_params, params_model
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import PrepareConfig, RunConfig
from ddptrain.config.sections.clusters import ClusterConfig, ClusterFile
from ddptrain.config.sections.sweeping import SweepConfig, samples_of, values_of
from ddptrain.config.types import default_name
from ddptrain.config.validation_errors import MAX_PROBLEMS, Schema, explain
from ddptrain.config.wording import KNOWN, describe_value, did_you_mean, dotted, shorten
from ddptrain.config.workload_check import code_problems
from ddptrain.config.yaml_reader import MAX_DEPTH, Document, copied, read_yaml
from ddptrain.errors import ConfigError, Problem
from ddptrain.redact import LEFT_OUT, hide_credentials, holds_secret, is_secret_name

_LAUNCHED = "the configuration"
_MOST_SAMPLES = 100  # of a field; each is checked with the model of the params


def load_config(source: Path | str, overrides: Sequence[str] = (), *, sweeps: bool = False) -> ResolvedConfig:
    """Load a file, or the shipped example of that name, and apply `overrides` (texts as `params.epochs=3`).

    sweeps: params that sweep.space names need no value, and get the first of their values.

    Raises ConfigError with all problems: those of the file in file order, then those of the overrides.
    """
    path, document, problems = _read(source)
    problems += _override(document, overrides)
    return _resolved(document, path, problems, sweeps=sweeps)


def load_mapping(
    data: Mapping[str, Any], folder: Path, overrides: Sequence[str] = (), *, source: str = _LAUNCHED
) -> ResolvedConfig:
    """Load a configuration from JSON data, as if a file in `folder` contained it, and apply `overrides`.

    `source` is the name of the data in errors. Raises ConfigError with all problems.
    """
    document = Document(source, copied(data))
    problems = _override(document, overrides)
    path = folder / "-"  # no such file exists; the name gives no name to the run
    return _resolved(document, path, problems)


def without_unknown(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run without the fields that only the version which recorded it had."""
    kept: dict[str, Any] = copied(dict(recorded))
    try:
        RunConfig.model_validate(kept)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "extra_forbidden":
                *sections, field = problem["loc"]
                found: Any = kept
                for name in sections:
                    found = found.get(name) if isinstance(found, dict) else None
                if isinstance(found, dict):
                    found.pop(field, None)
    return kept


def load_cluster(source: Path | str | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Load the `cluster:` section of a file (of a run, or with nothing else), and apply `overrides`.

    Without a file the overrides are the whole section. Raises ConfigError with all problems.
    """
    if source is not None:
        path, document, problems = _read(source)
    else:
        path, document, problems = Path("--set"), Document("--set", {}), []
    problems += _override(document, overrides)
    if "workload" in document.data:
        return _complete(_validate(document, path, problems), document, problems).cluster
    try:
        cluster = ClusterFile.model_validate(document.data)
    except ValidationError as error:
        problems += explain(error, document, Schema(ClusterFile, None))
    return _complete(None if problems else cluster, document, problems).cluster


def load_data(data: bytes, name: str) -> Any:
    """Return the content of a YAML file as plain data. Raises ConfigError if it is no YAML, or too large."""
    where = shorten(name, 300)
    document, problems = read_yaml(decode(data, where), where)
    if problems:
        raise ConfigError(problems[:1])
    return document.data


def _resolved(document: Document, path: Path, problems: list[Problem], *, sweeps: bool = False) -> ResolvedConfig:
    config = _complete(_validate(document, path, problems, sweeps=sweeps), document, problems)
    key = ("workload",) if config.script is None else ("workload", "script")
    return resolve(config, path, document.where(key) if document.places else "")


def _read(source: Path | str) -> tuple[Path, Document, list[Problem]]:
    """Return the path of the file, its content (a mapping) and the problems found so far."""
    path = find_config(source)
    name = shorten(str(path), 300)
    if path.suffix in (".py", ".ipynb") and path.is_file():
        hint = f"ddptrain run {shlex.quote(str(path))} runs a script" if path.suffix == ".py" else "name a YAML file"
        raise ConfigError([Problem(name, "", "is not a YAML file", hint)])
    text = read_text(path)
    document, problems = read_yaml(text, name)
    if document.data is None:
        what = "contains only comments" if text.strip() else "is empty"
        raise ConfigError([Problem(name, "", what, "a configuration has at least a line as workload: petnames")])
    if not isinstance(document.data, dict):
        got = f"expected a mapping, as workload: petnames, got {describe_value(document.data)}"
        raise ConfigError([document.problem((), got)])
    return path, document, problems


Config = TypeVar("Config")


def _complete(config: Config | None, document: Document, problems: list[Problem]) -> Config:
    """Return the configuration. Raises ConfigError with the problems, in the order of the input."""
    if config is not None and not problems:
        return config
    ordered = sorted(problems, key=lambda problem: document.order(problem.where))
    listed: set[str] = set()
    for number, problem in enumerate(ordered):  # the known keys of a section are listed only once
        if problem.hint in listed:
            ordered[number] = dataclasses.replace(problem, hint="")
        elif problem.hint.startswith(KNOWN):
            listed.add(problem.hint)
    if (more := len(ordered) - MAX_PROBLEMS) > 0:
        ordered[MAX_PROBLEMS:] = [Problem(document.source, "", f"and {more:,} more problems")]
    raise ConfigError(ordered)


def _validate(document: Document, path: Path, problems: list[Problem], *, sweeps: bool = False) -> RunConfig | None:
    data = dict(document.data)
    workload = data.get("workload")
    model = None
    if isinstance(workload, str) and workload:
        try:
            model = params_model(workload)
        except ConfigError as error:
            message = f"{error.problems[0].message}, got {describe_value(workload)}"
            problems.append(document.problem(("workload",), message, error.problems[0].hint))
    schema = Schema(RunConfig, model)
    if "name" not in data and isinstance(workload, str):
        data["name"] = default_name(workload, path.stem)
    params = data.get("params", {})
    searched = first_values(data.get("sweep"), model) if sweeps and isinstance(params, dict) else {}
    if searched:
        params = data["params"] = {**searched, **params}
    if model and isinstance(params, dict):
        try:
            check_params(model, params)
        except ValidationError as error:
            if not all(details["loc"] and details["loc"][0] in searched for details in error.errors()):
                problems += explain(error, document, schema, ("params",))  # sweep_problems has those of searched fields
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += explain(error, document, schema)
        return None
    problems += code_problems(config, path, document)
    problems += sweep_problems(config, model, document)
    return config


def _override(document: Document, overrides: Sequence[str]) -> list[Problem]:
    """Set the value of each `key=value` in the document; mappings on the way are created."""
    problems: list[Problem] = []
    for option in overrides:
        try:
            problems += _set(document, option)
        except ConfigError as error:
            problems += error.problems
    return problems


def _set(document: Document, option: str) -> list[Problem]:
    key, equals, text = option.partition("=")
    where, path = _option_text(key, option), tuple(key.split("."))
    document.options.append(where)
    if all(path[2:]) and len(path) > 2 and path[:2] == ("sweep", "space"):  # whose keys are such as params.lr
        path = (*path[:2], ".".join(path[2:]))
    if not equals or not all(path):
        return [Problem(where, "", "expected key=value", "as in --set params.epochs=3")]
    if len(path) > MAX_DEPTH:
        return [Problem(where, "", f"the key has more than {MAX_DEPTH} parts", "make it shorter")]
    given, problems = read_yaml(text, where, path, numbered=False)
    inside = document.data
    for end, part in enumerate(path[:-1], 1):
        if inside.get(part) is None:
            inside[part] = {}
            document.places[path[:end]] = where
        inside = inside[part]
        if not isinstance(inside, dict):
            above = dotted(path[:end])
            message = f"{above} is {describe_value(inside, path)}, which has no keys"
            return [Problem(where, shorten(key), message, f"set {above} itself")]
    inside[path[-1]] = given.data
    document.places = {known: at for known, at in document.places.items() if known[: len(path)] != path}
    document.places[path] = where
    return problems


def _option_text(key: str, option: str) -> str:
    if holds_secret(tuple(key.split("."))):
        return f"--set {shorten(key)}={LEFT_OUT}"
    return f"--set {shorten(hide_credentials(option))}"


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
