"""The fields of a configuration for `--set KEY=VALUE`, from the JSON schema and from the YAML file that is named."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple

from ddptrain.completion.names import configurations, is_plain, schema_file

Schema = dict[str, Any]
_MAX_BYTES = 1 << 20
_DEEPEST = 6


class Field(NamedTuple):
    """A field: the texts of its fixed values, of its default, and what it is for."""

    values: tuple[str, ...] = ()
    default: str = ""
    help: str = ""


def fields_of(config: str) -> dict[str, Field]:
    """Return all fields by name, as `checkpoint.keep`; params are those of the workload of `config`, a name or a file.

    Returns no field if the schema can't be read, and no params if the file can't be.
    """
    with suppress(OSError, ValueError):
        with open(schema_file(), encoding="utf-8") as file:
            schema: Schema = json.load(file)
        fields: dict[str, Field] = {}
        _collect(schema, "", schema["$defs"], fields, 0)
        fields.pop("params", None)
        return fields | _params(config, schema["$defs"])
    return {}


def _params(config: str, definitions: Schema) -> dict[str, Field]:
    content = _content(config)
    workload, params = content.get("workload"), content.get("params")
    if isinstance(workload, str) and (definition := definitions.get(f"{workload}.params")):
        fields: dict[str, Field] = {}
        _collect(definition, "params.", definitions, fields, 0)
        return fields
    named = params.items() if isinstance(params, dict) else ()
    return {f"params.{name}": Field(default=_text(value)) for name, value in named if is_plain(str(name))}


def _content(config: str) -> dict[Any, Any]:
    """Return the content of a YAML file, or of a shipped example; {} if it can't be read."""
    import yaml

    path = configurations().get(config, config)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError), open(path, "rb") as file:
        content = yaml.load(file.read(_MAX_BYTES), loader)  # noqa: S506 - both loaders are safe ones
        return content if isinstance(content, dict) else {}
    return {}


def _collect(section: Schema, prefix: str, definitions: Schema, fields: dict[str, Field], depth: int) -> None:
    """Add the fields of a section, and of the sections in it."""
    for name, field in section.get("properties", {}).items():
        forms = _forms(field, definitions)
        inner = [form for form in forms if form.get("properties")]
        for form in inner if depth < _DEEPEST else ():
            _collect(form, f"{prefix}{name}.", definitions, fields, depth + 1)
        if len(inner) < len(forms):
            default = _text(field["default"]) if "default" in field else ""
            fields[f"{prefix}{name}"] = Field(_values(forms), default, field.get("description", ""))


def _forms(field: Schema, definitions: Schema) -> list[Schema]:
    """Return the forms that a field may have, with references resolved."""
    if "$ref" in field:
        field = definitions[field["$ref"].rpartition("/")[2]]
    several = field.get("anyOf") or field.get("oneOf")
    return [form for each in several for form in _forms(each, definitions)] if several else [field]


def _values(forms: list[Schema]) -> tuple[str, ...]:
    """Return the texts of all fixed values."""
    values: list[Any] = []
    for form in forms:
        values += form.get("enum", [form["const"]] if "const" in form else [])
        values += [True, False] if form.get("type") == "boolean" else []
        values += [None] if form.get("type") == "null" and values else []
    return tuple(dict.fromkeys(text for value in values if (text := _text(value))))


def _text(value: Any) -> str:
    """Return a value as --set takes it; "" for one that needs quotes."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if is_plain(text) else ""
