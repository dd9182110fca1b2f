"""Converts pydantic's errors into problems with a place, the full key and a hint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ddptrain.config.types import MODULE_PATTERN, NAME_PATTERN, duration_s, slug
from ddptrain.config.wording import PathKey, describe_value, did_you_mean, dotted, nearest
from ddptrain.config.yaml_reader import Document, scalar
from ddptrain.errors import Problem

_NUMBER = "a number"
_WHOLE = "a whole number"
_TEXT = "text"
_MAPPING = "a mapping, as key: value"
_LIST = "a list"
_EXPECTED = {
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "string_type": _TEXT,
    "path_type": _TEXT,
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dataclass_type": _MAPPING,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",  # but for _PATTERNS
    "too_short": "{min_length} or more values",
    "too_long": "at most {max_length} values",
}
_PATTERNS = {
    NAME_PATTERN: "a name of 1 to 64 lower-case letters, digits, dots, dashes and underscores that begins with "
    "a letter or digit",
    MODULE_PATTERN: "a module's name, as package.module",
}
MAX_PROBLEMS = 50
# Follow-up errors of a field that has an error of its own.
_CONSEQUENCES = {"default_factory_not_called"}


@dataclass(frozen=True, slots=True)
class Schema:
    """The known keys: the model of the run, and the model of its params if there is one."""

    run: type[BaseModel]
    params: type[BaseModel] | None

    def keys(self) -> list[str]:
        """Return the full keys of all fields and of those of their sections, as cluster.ranks."""
        first = self.siblings(())
        return [*first, *(f"{section}.{name}" for section in first for name in self.siblings((section,)))]

    def siblings(self, parent: PathKey) -> list[str]:
        """Return the known keys of the mapping at `parent`; empty if any key is allowed."""
        models = [self.run]
        if parent[:1] == ("params",):
            models, parent = [self.params] if self.params else [], parent[1:]
        for part in (name for name in parent if isinstance(name, str)):
            # The parts that are no fields are names in a mapping of models, as in sweep.space.
            models = [inner for model in models for inner in _models_in(_fields(model).get(part, model))]
        return [name for model in models for name in _fields(model)]


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def explain(error: ValidationError, document: Document, schema: Schema, prefix: PathKey = ()) -> list[Problem]:
    """Return one problem for each wrong value; `prefix` is the key of the validated data in the document."""
    groups: dict[PathKey, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        if details["type"] not in _CONSEQUENCES:
            groups.setdefault(_path(document.data, prefix, details), []).append(details)
    # Problems beyond the limit are only counted: searching the most similar key is slow.
    return [
        _problem(document, path, group, schema) if number < MAX_PROBLEMS else Problem(document.where(path), "", "")
        for number, (path, group) in enumerate(groups.items())
    ]


def _path(value: Any, prefix: PathKey, details: ErrorDetails) -> PathKey:
    """Return the key of the wrong value, without the names that pydantic adds for members of a union."""
    names = list(details["loc"])
    missing = [names.pop()] if details["type"] == "missing" and names else []
    path: list[str | int] = list(prefix)
    for part in prefix:
        value = value.get(part) if isinstance(value, Mapping) else None
    for name in names:
        inside = isinstance(value, Mapping) and name in value
        if inside or (isinstance(value, list) and isinstance(name, int) and name < len(value)):
            path.append(name)
            value = value[name]
    blamed = details.get("ctx", {}).get("field", "") if details["type"] == "wrong_field" else ""
    return (*path, *missing, *(blamed.split(".") if blamed else []))


def _problem(document: Document, path: PathKey, group: Sequence[ErrorDetails], schema: Schema) -> Problem:
    first = group[0]
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            key = dotted(path)
            hint = "as in workload: train:train" if key == "workload" else f"write {key}: VALUE"
            return document.problem(path, "is required, and not given", hint)
        case "extra_forbidden":
            return document.problem(path, "unknown key", _unknown_hint(path, schema))
        case "wrong_field":
            return document.problem(path, str(context["message"]), str(context["hint"]))
        case "value_error" | "assertion_error":
            text, value = str(context["error"]), describe_value(first["input"], path)
            return document.problem(path, text if text.startswith(value) else f"{text}, got {value}")
    # Each member of a union reports what it accepts.
    expected = " or ".join(dict.fromkeys(_expected(details) for details in group))
    message = f"expected {expected}, got {describe_value(first['input'], path)}"
    types = {each["type"] for each in group}
    choices = re.findall(r"'([^']*)'", expected) if types & {"literal_error", "enum"} else []
    return document.problem(path, message, _value_hint(path, first["input"], types, choices))


def _expected(details: ErrorDetails) -> str:
    context: Mapping[str, Any] = details.get("ctx", {})
    if (pattern := context.get("pattern")) in _PATTERNS:
        return _PATTERNS[pattern]
    template = _EXPECTED.get(details["type"])
    if template is None:
        return details["msg"].removeprefix("Input should be ").rstrip(".")
    texts = {key: f"{value:.15g}" if isinstance(value, float) else str(value) for key, value in context.items()}
    return template.format(**texts)


def _unknown_hint(path: PathKey, schema: Schema) -> str:
    name, parent = str(path[-1]), path[:-1]
    siblings = schema.siblings(parent)
    match = nearest(name, siblings)
    if match is None:  # the key of one of the sections beside it, as cluster.ssh.hosts for cluster.hosts, or elsewhere
        below = [dotted((*parent, each, name)) for each in siblings if name in schema.siblings((*parent, each))]
        elsewhere = [key for key in schema.keys() if key.rpartition(".")[2] == name]  # noqa: SIM118
        if found := [*(below if parent else ()), *elsewhere]:
            return f"did you mean {found[0]}?"
    if len(longer := [dotted((*parent, each)) for each in siblings if each.startswith(f"{name}_")]) > 1:
        return f"did you mean {', '.join(longer[:-1])} or {longer[-1]}?"  # every: every_epochs, every_steps, ...
    if match is None and not parent and schema.params is None:
        return f"a parameter of the workload is {dotted(('params', name))}; {did_you_mean(name, siblings)}"
    return f"did you mean {dotted((*parent, match))}?" if match else did_you_mean(name, siblings)


def _value_hint(path: PathKey, value: object, types: set[str], choices: Sequence[str]) -> str:
    if path in (("name",), ("cluster", "name")) and isinstance(value, str):
        return f"as in {slug(value)}" if slug(value) else ""
    if "string_type" in types and isinstance(value, int | float):
        return "write it in quotes"
    if value is None and path[:1] == ("env",):  # CUDA_VISIBLE_DEVICES: 0,1 in braces is 0, and a key 1
        return 'write "" for an empty value, or quotes around a value with a comma'
    if not isinstance(value, str):
        return ""
    if choice := nearest(value, choices):
        return f"did you mean {choice}?"
    if "bool_type" in types and value.lower() in {"yes", "no", "on", "off", "y", "n", "true", "false"}:
        return "write true or false, without quotes"
    if "list_type" in types:
        return "write a list, as [a, b]"
    if "float_type" in types and str(path[-1]).endswith("_s"):
        with suppress(ValueError):
            return f"write the seconds: {duration_s(value):g}"
    if types & {"int_type", "float_type"} and _is_number(value.replace("_", "").replace(",", "")):
        return "write the number without quotes, commas or underscores"
    return ""


def _is_number(text: str) -> bool:
    try:
        return text != "" and type(scalar(text)) in (int, float)
    except ValueError:
        return False
