"""From a YAML file and --set options to a RunConfig and back, with every problem told at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ddptrain.config import params as config_params
from ddptrain.config import registry
from ddptrain.config.models import ClusterConfig, ClusterFile, RunConfig, default_name
from ddptrain.config.problems import MAX_PROBLEMS, Schema, explain, place_of
from ddptrain.config.resolved import ResolvedConfig, check_params, import_folders, resolve
from ddptrain.config.wording import dotted, nearest, seen, shown
from ddptrain.config.yaml import MAX_DEPTH, Located, Node, Place, parse_yaml, plain, read_text
from ddptrain.errors import ConfigError, Problem
from ddptrain.redact import LEFT_OUT, hide_credentials, holds_secret

_MAX_NEIGHBOURS = 1000
_LAUNCHED = "the configuration"


def load_config(source: Path | str, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """The configuration in the file, or in the shipped example of that name, changed by `overrides`.

    Raises: ConfigError with every problem found, in file order, those of the overrides last.
    """
    path, root, problems = _read(source)
    problems += _overridden(root, overrides)
    config = _validate(root, path, problems)
    if problems or config is None:
        raise ConfigError(_in_order(problems, shown(str(path), 300)))
    return resolve(config, path)


def _nodes(place: Place, value: Any) -> Node:
    if isinstance(value, Mapping):
        return Node(place, {key: _nodes(place, below) for key, below in value.items()})
    return Node(place, [_nodes(place, item) for item in value] if isinstance(value, list) else value)


def load_mapping(
    data: Mapping[str, Any], folder: Path, overrides: Sequence[str] = (), *, source: str = _LAUNCHED
) -> ResolvedConfig:
    """The configuration that `data`, JSON data of a program, describes, as if it stood in a file in that folder.

    `source` is what errors call it. Raises: ConfigError with every problem found.
    """
    root = _nodes(Place(0, 0, 0, source), data)
    problems = _overridden(root, overrides)
    path = folder / "-"  # there is none of that name, nor does it give one to the run
    config = _validate(root, path, problems)
    if problems or config is None:
        raise ConfigError(_in_order(problems, source))
    return resolve(config, path)


def load_cluster(source: Path | str | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The `cluster:` section of a file (a run's, or one that holds nothing else), changed by `overrides`.

    Without a file the overrides say it all. Raises: ConfigError with every problem found.
    """
    if source is not None:
        path, root, problems = _read(source)
    else:
        path, root, problems = Path("--set"), Node(Place(0, 0, 0, "--set"), {}), []
    problems += _overridden(root, overrides)
    if "workload" in root.value:
        run = _validate(root, path, problems)
        found = run.cluster if run else None
    else:
        found = _validate_cluster(root, problems)
    if problems or found is None:
        raise ConfigError(_in_order(problems, shown(str(path), 300)))
    return found


def _read(source: Path | str) -> tuple[Path, Node, list[Located]]:
    """Return the path of the file, its tree (a mapping) and the problems found so far."""
    path = _find(source)
    text = read_text(path)
    name = shown(str(path), 300)
    document = parse_yaml(text, lambda line, column: Place(0, line, column, f"{name}:{line}"))
    if document.root is None or document.root.value is None:
        what = "holds only comments" if text.strip() else "is empty"
        raise ConfigError([Problem(name, "", what, "a configuration has at least a line as workload: petnames")])
    if not isinstance(document.root.value, dict):
        got = f"expected a mapping, as workload: petnames, got {seen(document.root.value)}"
        raise ConfigError([Problem(document.root.place.text, "", got)])
    return path, document.root, document.problems


def _overridden(root: Node, overrides: Sequence[str]) -> list[Located]:
    return [problem for number, option in enumerate(overrides, 1) for problem in _override(root, number, option)]


def _validate_cluster(root: Node, problems: list[Located]) -> ClusterConfig | None:
    try:
        return ClusterFile.model_validate(plain(root)).cluster
    except ValidationError as error:
        problems += explain(error, root, Schema(ClusterFile, None))
        return None


def _in_order(problems: list[Located], name: str) -> list[Problem]:
    ordered = [each.problem for each in sorted(problems, key=lambda each: each.place)]
    more = len(ordered) - MAX_PROBLEMS
    return [
        *ordered[:MAX_PROBLEMS],
        *([Problem(name, "", f"and {more:,} more problems")] if more > 0 else []),
    ]


def _validate(root: Node, path: Path, problems: list[Located]) -> RunConfig | None:
    data = plain(root)
    workload = data.get("workload")
    model = _params_model(workload, path, root, problems) if isinstance(workload, str) and workload else None
    schema = Schema(RunConfig, model)
    if "name" not in data and isinstance(workload, str):
        data["name"] = default_name(workload, path.stem)
    params = data.get("params", {})
    if model and isinstance(params, dict):
        try:
            check_params(model, params)
        except ValidationError as error:
            problems += explain(error, root, schema, ("params",))
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += explain(error, root, schema)
        return None
    problems += _script_problems(config, path, root)
    return config


def _script_problems(config: RunConfig, path: Path, root: Node) -> list[Located]:
    """A script that is not there. One of a cluster's own file system, named by its whole path, may well be there."""
    script = config.script
    if script is None or script.script is None or any(_is_file(found) for found in _candidates(script.script, path)):
        return []
    if os.path.isabs(script.script) and not config.cluster.is_embedded:
        return []
    place = place_of(root, ("workload", "script"))
    message = f"there is no such file, got {seen(script.script)}"
    name = Path(script.script)
    beside = [found.name for found in _candidates(str(name.parent), path) for found in _files(found)]
    match = nearest(name.name, beside[:_MAX_NEIGHBOURS])
    looked = " and ".join(dict.fromkeys(shown(folder, 200) for folder in import_folders(path)))
    hint = f"did you mean {name.parent / match}?" if match else f"looked for in {looked}"
    return [Located(place, Problem(place.text, "workload.script", message, hint))]


def _candidates(name: str, path: Path) -> list[Path]:
    return [Path(folder) / name for folder in import_folders(path)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(itertools.islice(folder.glob("*.py"), _MAX_NEIGHBOURS))
    except (OSError, ValueError):
        return []


def _params_model(workload: str, path: Path, root: Node, problems: list[Located]) -> type[BaseModel] | None:
    try:
        model = registry.params_model(workload)
        return model or _model_of_function(workload, path, root, problems)
    except ConfigError as error:
        place = place_of(root, ("workload",))
        for problem in error.problems:
            message = f"{problem.message}, got {seen(workload)}"
            problems.append(Located(place, Problem(place.text, "workload", message, problem.hint)))
        return None


def _model_of_function(workload: str, path: Path, root: Node, problems: list[Located]) -> type[BaseModel] | None:
    """What the source of a user's own function says about its params; one that is not there is a problem."""
    module, _, name = registry.workload_target(workload).partition(":")
    found = config_params.find_source(module, [*import_folders(path), *sys.path])
    if found is None:
        return None
    names = config_params.names_in(found)
    if names is not None and (first := name.partition(".")[0]) not in names:
        place = place_of(root, ("workload",))
        message = f"{shown(str(found.path), 300)} has no {first}, got {seen(workload)}"
        match = nearest(first, names)
        hint = f"did you mean {module}:{match}?" if match else "name a function that it has"
        problems.append(Located(place, Problem(place.text, "workload", message, hint)))
        return None
    return config_params.params_model(found, name)


def _override(root: Node, number: int, option: str) -> list[Located]:
    """Puts the value of one `key=value` into the tree, and makes mappings on the way."""
    key, equals, text = option.partition("=")
    place = Place(number, 0, 0, _option_text(key, option))
    path = tuple(key.split("."))
    if not equals or not all(path):
        return [_malformed(place, "", "expected key=value", "as in --set params.epochs=3")]
    if len(path) > MAX_DEPTH:
        return [_malformed(place, "", f"the key has more than {MAX_DEPTH} parts", "make it shorter")]
    try:
        document = parse_yaml(text, lambda line, column: dataclasses.replace(place, line=line, column=column), path)
    except ConfigError as error:
        return [Located(place, problem) for problem in error.problems]
    parent = root.value
    for depth, part in enumerate(path[:-1], 1):
        child = parent.get(part)
        if child is None or child.value is None:
            parent[part] = Node(place, {})
        elif isinstance(child.value, dict):
            # A copy, for an alias may share the mapping with another key.
            parent[part] = Node(child.place, dict(child.value))
        else:
            what = f"{dotted(path[:depth])} is {seen(child.value, path)}, which has no keys"
            return [_malformed(place, key, what, f"set {dotted(path[:depth])} itself")]
        parent = parent[part].value
    node = document.root or Node(place, None)
    parent[path[-1]] = dataclasses.replace(node, place=place)
    return document.problems


def _option_text(key: str, option: str) -> str:
    if holds_secret(tuple(key.split("."))):
        return f"--set {shown(key)}={LEFT_OUT}"
    return f"--set {shown(hide_credentials(option))}"


def _malformed(place: Place, key: str, message: str, hint: str) -> Located:
    return Located(place, Problem(place.text, shown(key), message, hint))


def shipped_configs() -> dict[str, Path]:
    """The examples that come with ddptrain, by name: from the package, or from the checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def _find(source: Path | str) -> Path:
    path = Path(source)
    if not str(source).strip():
        raise ConfigError([Problem("configuration", "", "no file is named", "as in configs/petnames.yaml")])
    try:
        os.stat(path)
        return path
    except (FileNotFoundError, NotADirectoryError):
        shipped = shipped_configs()
    except (OSError, ValueError):
        # It is there, or can't be: reading it says what is wrong.
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    raise ConfigError([Problem(shown(str(path), 300), "", "there is no such file", _missing_hint(path, shipped))])


def _missing_hint(path: Path, shipped: dict[str, Path]) -> str:
    beside: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError), os.scandir(path.parent) as entries:
        names = (entry.name for entry in itertools.islice(entries, _MAX_NEIGHBOURS))
        beside = {Path(name).stem: name for name in names if name.endswith((".yaml", ".yml"))}
    if match := nearest(path.stem, beside):
        return f"did you mean {shown(str(path.parent / beside[match]), 300)}?"
    if match := nearest(path.stem, shipped):
        return f"did you mean {match}?"
    return f"shipped examples are: {', '.join(shipped)}" if shipped else ""
