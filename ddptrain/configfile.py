"""From a YAML file and --set options to a RunConfig and back, with every problem told at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ddptrain import registry
from ddptrain.config import ClusterConfig, ClusterFile, RunConfig, default_name
from ddptrain.configcheck import MAX_PROBLEMS, Schema, explain, place_of
from ddptrain.errors import ConfigError, Problem
from ddptrain.redact import LEFT_OUT, hide_credentials, holds_secret, is_secret_name, is_secret_option
from ddptrain.wording import dotted, nearest, seen, shown
from ddptrain.yamlsource import MAX_DEPTH, Located, Node, Place, parse_yaml, plain, read_text, scalar

_MAX_NEIGHBOURS = 1000


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, the file it came from, and that file's text (without what --set changed)."""

    config: RunConfig
    path: Path
    text: str


def load_config(source: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The configuration in the file, or in the shipped example of that name, changed by `overrides`.

    Raises: ConfigError with every problem found, in file order, those of the overrides last.
    """
    path, text, root, problems = _read(source)
    problems += _overridden(root, overrides)
    config = _validate(root, path, problems)
    if problems or config is None:
        raise ConfigError(_in_order(problems, shown(str(path), 300)))
    return LoadedConfig(config, path, text)


def load_cluster(source: Path | str | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The `cluster:` section of a file (a run's, or one that holds nothing else), changed by `overrides`.

    Without a file the overrides say it all. Raises: ConfigError with every problem found.
    """
    if source is not None:
        path, _, root, problems = _read(source)
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


def _read(source: Path | str) -> tuple[Path, str, Node, list[Located]]:
    """A file's path, text, tree (a mapping) and the problems found so far."""
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
    return path, text, document.root, document.problems


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
    model = _params_model(workload, root, problems) if isinstance(workload, str) and workload else None
    schema = Schema(RunConfig, model)
    if "name" not in data and isinstance(workload, str):
        data["name"] = default_name(workload, path.stem)
    params = data.get("params", {})
    if model and isinstance(params, dict):
        try:
            _fill(model, params)
        except ValidationError as error:
            problems += explain(error, root, schema, ("params",))
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems += explain(error, root, schema)
        return None


def _params_model(workload: str, root: Node, problems: list[Located]) -> type[BaseModel] | None:
    try:
        return registry.params_model(workload)
    except ConfigError as error:
        place = place_of(root, ("workload",))
        for problem in error.problems:
            message = f"{problem.message}, got {seen(workload)}"
            problems.append(Located(place, Problem(place.text, "workload", message, problem.hint)))
        return None


def _fill(model: type[BaseModel], params: dict[str, Any]) -> BaseModel:
    """The params as their model has them. JSON's strict mode is what fits YAML: a list may become a tuple."""
    return model.model_validate_json(json.dumps(params), strict=True)


def resolved_params(config: RunConfig) -> dict[str, Any]:
    """The params with the defaults of the workload's model filled in, as plain data.

    Raises: ConfigError where the workload is unknown; ValidationError where the params were never checked.
    """
    model = registry.params_model(config.workload)
    return _fill(model, config.params).model_dump(mode="json") if model else dict(config.params)


def resolved_config(config: RunConfig) -> RunConfig:
    """The configuration with every default filled in, the workload's own included: what config.yaml records."""
    return config.model_copy(update={"params": resolved_params(config)})


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
    package = Path(__file__).parent
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


class _Dumper(yaml.SafeDumper):
    """Writes what `yamlsource` reads: quotes all text that it would take for something else; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # Left to itself, PyYAML folds U+0085 and its like into a blank.
        style = None if _is_text(value) and value.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _Dumper.text)


def _is_text(value: str) -> bool:
    try:
        return isinstance(scalar(value), str)
    except ValueError:
        return False


def without_secrets(config: RunConfig) -> RunConfig:
    """The configuration with "<left out>" for secrets in `env` and `params`, and for credentials in URLs."""
    data: dict[str, Any] = _hide(config.model_dump())
    hidden = {name: LEFT_OUT if is_secret_name(name) else value for name, value in data["env"].items()}
    return RunConfig.model_validate({**data, "env": hidden})


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: LEFT_OUT if isinstance(below, str) and below and is_secret_option(key) else _hide(below)
            for key, below in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(below) for below in value]
    return hide_credentials(value) if isinstance(value, str) else value


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back equal, but for secrets, which are left out."""
    data = without_secrets(config).model_dump()
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
