"""Loads a configuration from a YAML file and --set options; an error lists all problems."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ddptrain.config import function_signature as config_params
from ddptrain.config import plugin_names
from ddptrain.config.config_file import MAX_NEIGHBOURS, decode, find_config, python_files, read_text
from ddptrain.config.params_check import check_params
from ddptrain.config.resolved import ResolvedConfig, import_folders, resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.clusters import ClusterConfig, ClusterFile
from ddptrain.config.sweep_check import first_values, sweep_problems
from ddptrain.config.types import default_name
from ddptrain.config.validation_errors import MAX_PROBLEMS, Schema, explain, located, place_of
from ddptrain.config.wording import KNOWN, describe_value, dotted, nearest, shorten
from ddptrain.config.yaml_reader import MAX_DEPTH, Located, Node, Place, make_nodes, parse_yaml, plain
from ddptrain.errors import ConfigError, Problem
from ddptrain.redact import LEFT_OUT, hide_credentials, holds_secret

_LAUNCHED = "the configuration"
COMMAND_LINE = "ddptrain run"  # the source of a script that has no configuration file


def load_config(source: Path | str, overrides: Sequence[str] = (), *, sweeps: bool = False) -> ResolvedConfig:
    """Load a file, or the shipped example of that name, and apply `overrides` (texts as `params.epochs=3`).

    sweeps: params that sweep.space names need no value, and get the first of their values.

    Raises ConfigError with all problems: those of the file in file order, then those of the overrides.
    """
    path, root, problems = _read(source)
    problems += _overridden(root, overrides)
    config = _validate(root, path, problems, sweeps=sweeps)
    if problems or config is None:
        raise ConfigError(_in_order(problems, shorten(str(path), 300)))
    return resolve(config, path)


def load_mapping(
    data: Mapping[str, Any], folder: Path, overrides: Sequence[str] = (), *, source: str = _LAUNCHED
) -> ResolvedConfig:
    """Load a configuration from JSON data, as if a file in `folder` contained it, and apply `overrides`.

    `source` is the name of the data in errors. Raises ConfigError with all problems.
    """
    root = make_nodes(Place(0, 0, 0, source), data)
    problems = _overridden(root, overrides)
    path = folder / "-"  # no such file exists; the name gives no name to the run
    config = _validate(root, path, problems)
    if problems or config is None:
        raise ConfigError(_in_order(problems, source))
    return resolve(config, path)


def load_cluster(source: Path | str | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Load the `cluster:` section of a file (of a run, or with nothing else), and apply `overrides`.

    Without a file the overrides are the whole section. Raises ConfigError with all problems.
    """
    if source is not None:
        path, root, problems = _read(source)
    else:
        path, root, problems = Path("--set"), Node(Place(0, 0, 0, "--set"), {}), []
    problems += _overridden(root, overrides)
    if "workload" in root.value:
        run = _validate(root, path, problems)
        cluster = run.cluster if run else None
    else:
        try:
            cluster = ClusterFile.model_validate(plain(root)).cluster
        except ValidationError as error:
            cluster = None
            problems += explain(error, root, Schema(ClusterFile, None))
    if problems or cluster is None:
        raise ConfigError(_in_order(problems, shorten(str(path), 300)))
    return cluster


def load_data(data: bytes, name: str) -> Any:
    """Return the content of a YAML file as plain data. Raises ConfigError if it is no YAML, or too large."""
    where = shorten(name, 300)
    root, problems = parse_yaml(decode(data, where), lambda line, column: Place(0, line, column, f"{where}:{line}"))
    if problems:
        raise ConfigError([problems[0].problem])
    return plain(root) if root is not None else None


def place_in_file(path: Path, key: tuple[str, ...], value: object) -> str:
    """Return the place of a key as FILE:LINE; the file alone if it has another value there, as with --set."""
    name = shorten(str(path), 300)
    try:
        root, _ = parse_yaml(read_text(path), lambda line, column: Place(0, line, column, f"{name}:{line}"))
    except ConfigError:
        return name
    present = plain(root) if root is not None else None
    for part in key:
        present = present.get(part) if isinstance(present, dict) else None
    return place_of(root, key).text if root is not None and present == value else name


def _read(source: Path | str) -> tuple[Path, Node, list[Located]]:
    """Return the path of the file, its tree (a mapping) and the problems found so far."""
    path = find_config(source)
    if path.suffix in (".py", ".ipynb") and path.is_file():
        hint = f"ddptrain run {shlex.quote(str(path))} runs a script" if path.suffix == ".py" else "name a YAML file"
        raise ConfigError([Problem(shorten(str(path), 300), "", "is not a YAML file", hint)])
    text = read_text(path)
    name = shorten(str(path), 300)
    root, problems = parse_yaml(text, lambda line, column: Place(0, line, column, f"{name}:{line}"))
    if root is None or root.value is None:
        what = "contains only comments" if text.strip() else "is empty"
        raise ConfigError([Problem(name, "", what, "a configuration has at least a line as workload: petnames")])
    if not isinstance(root.value, dict):
        got = f"expected a mapping, as workload: petnames, got {describe_value(root.value)}"
        raise ConfigError([Problem(root.place.text, "", got)])
    return path, root, problems


def _overridden(root: Node, overrides: Sequence[str]) -> list[Located]:
    return [problem for number, option in enumerate(overrides, 1) for problem in _override(root, number, option)]


def _in_order(problems: list[Located], name: str) -> list[Problem]:
    """Return the problems by their places. The known keys of a section are listed only once."""
    ordered = [each.problem for each in sorted(problems, key=lambda each: each.place)]
    listed: set[str] = set()
    for number, problem in enumerate(ordered):
        if problem.hint in listed:
            ordered[number] = dataclasses.replace(problem, hint="")
        elif problem.hint.startswith(KNOWN):
            listed.add(problem.hint)
    more = len(ordered) - MAX_PROBLEMS
    return [*ordered[:MAX_PROBLEMS], *([Problem(name, "", f"and {more:,} more problems")] if more > 0 else [])]


def _validate(root: Node, path: Path, problems: list[Located], *, sweeps: bool = False) -> RunConfig | None:
    data = plain(root)
    workload = data.get("workload")
    model = _params_model(workload, path, root, problems) if isinstance(workload, str) and workload else None
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
                problems += explain(error, root, schema, ("params",))  # sweep_problems has those of searched fields
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += explain(error, root, schema)
        return None
    problems += _script_problems(config, path, root)
    if config.evaluate is not None:
        _find_function("evaluate", config.evaluate, path, root, problems)
    problems += sweep_problems(config, model, root)
    return config


def _script_problems(config: RunConfig, path: Path, root: Node) -> list[Located]:
    """Return the problem that the script does not exist. An absolute path may exist on the file system of a cluster."""
    script = config.script.script if config.script is not None else None
    if script is None:
        return []
    key = () if root.place.text == COMMAND_LINE else ("workload", "script")
    shown = describe_value(script)
    if script.endswith(".ipynb"):
        message = f"expected a Python file, got the notebook {shown.removeprefix('the text ')}"
        return [located(root, key, message, f"convert it: jupyter nbconvert --to script {shorten(script)}")]
    candidates = _candidates(script, path)
    if any(_is_program(each) for each in candidates) or (os.path.isabs(script) and not config.cluster.is_embedded):
        return []
    if any(each.is_dir() for each in candidates):
        message = f"expected a Python file, got the folder {shown.removeprefix('the text ')}"
        return [located(root, key, message, "name the file in it; a folder is run only if it has a __main__.py")]
    name = Path(script)
    beside = [file.name for folder in _candidates(str(name.parent), path) for file in python_files(folder)]
    match = nearest(name.name, beside[:MAX_NEIGHBOURS])
    looked = " and ".join(dict.fromkeys(shorten(folder, 200) for folder in import_folders(path)))
    hint = f"did you mean {name.parent / match}?" if match else f"looked for in {looked}"
    return [located(root, key, f"there is no such file, got {shown}", hint)]


def _candidates(name: str, path: Path) -> list[Path]:
    return [Path(folder) / name for folder in import_folders(path)]


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):
        return False


def _params_model(workload: str, path: Path, root: Node, problems: list[Located]) -> type[BaseModel] | None:
    try:
        model = plugin_names.params_model(workload)
        return model or _model_of_function(workload, path, root, problems)
    except ConfigError as error:
        for problem in error.problems:
            message = f"{problem.message}, got {describe_value(workload)}"
            problems.append(located(root, ("workload",), message, problem.hint))
        return None


def _model_of_function(workload: str, path: Path, root: Node, problems: list[Located]) -> type[BaseModel] | None:
    """The model of the params, read from the source of the user's function; adds a problem if there is no function."""
    target = plugin_names.workload_target(workload)
    source = _find_function("workload", target, path, root, problems)
    return config_params.params_model(source, target.partition(":")[2]) if source is not None else None


def _find_function(
    field: str, target: str, path: Path, root: Node, problems: list[Located]
) -> config_params.Found | None:
    """Return the source with a function of the user; None if it is not found. Adds a problem if it surely is missing.

    target: module:function, the value of a field.
    """
    module, _, name = target.partition(":")
    source = config_params.find_source(module, [*import_folders(path), *sys.path])
    if source is None:
        return None
    names = config_params.names_in(source)
    if names is not None and (first := name.partition(".")[0]) not in names:
        message = f"{shorten(str(source.path), 300)} has no {first}, got {describe_value(target)}"
        match = nearest(first, names)
        hint = f"did you mean {module}:{match}?" if match else "name a function that it has"
    elif config_params.is_module(source, name):
        message = f"{name} is a module that {shorten(str(source.path), 300)} imports, not a function"
        hint = f"name a function of {module}, as {module}:train"
    else:
        return source
    problems.append(located(root, (field,), message, hint))
    return None


def _override(root: Node, number: int, option: str) -> list[Located]:
    """Set the value of one `key=value` in the tree; mappings on the way are created."""
    key, equals, text = option.partition("=")
    place = Place(number, 0, 0, _option_text(key, option))
    path = tuple(key.split("."))
    if all(path[2:]) and len(path) > 2 and path[:2] == ("sweep", "space"):  # whose keys are such as params.lr
        path = (*path[:2], ".".join(path[2:]))
    if not equals or not all(path):
        return [_malformed(place, "", "expected key=value", "as in --set params.epochs=3")]
    if len(path) > MAX_DEPTH:
        return [_malformed(place, "", f"the key has more than {MAX_DEPTH} parts", "make it shorter")]
    try:
        given, problems = parse_yaml(
            text, lambda line, column: dataclasses.replace(place, line=line, column=column), path
        )
    except ConfigError as error:
        return [Located(place, problem) for problem in error.problems]
    parent = root.value
    for depth, part in enumerate(path[:-1], 1):
        child = parent.get(part)
        if child is None or child.value is None:
            parent[part] = Node(place, {})
        elif isinstance(child.value, dict):
            # A copy: an alias may share the mapping with another key.
            parent[part] = Node(child.place, dict(child.value))
        else:
            what = f"{dotted(path[:depth])} is {describe_value(child.value, path)}, which has no keys"
            return [_malformed(place, key, what, f"set {dotted(path[:depth])} itself")]
        parent = parent[part].value
    node = given or Node(place, None)
    parent[path[-1]] = dataclasses.replace(node, place=place)
    return problems


def _option_text(key: str, option: str) -> str:
    if holds_secret(tuple(key.split("."))):
        return f"--set {shorten(key)}={LEFT_OUT}"
    return f"--set {shorten(hide_credentials(option))}"


def _malformed(place: Place, key: str, message: str, hint: str) -> Located:
    return Located(place, Problem(place.text, shorten(key), message, hint))
