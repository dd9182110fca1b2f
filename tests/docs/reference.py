"""Writes docs/reference/configuration.md from the JSON schema of the configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.config.json_schema import config_schema

TARGET = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
Schema = Mapping[str, Any]
_HEAD = """# Configuration

Every field of a YAML file. `ddptrain init --schema` prints the same as a JSON schema, with which editors complete and
check the file. `--set FIELD=VALUE` of `train`, `run`, `retrain` and `sweep` replaces a
field, as `--set checkpoint.keep=5`.

```yaml
workload: train:train         # the only field that is required
params: {epochs: 20, lr: 0.01}
cluster: {ranks: 2}
checkpoint: {every_epochs: 5, metric: loss, mode: min}
failure: {max_restarts: 2}
```
"""
_FIELDS = "| field | values | default | |\n|---|---|---|---|\n"
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def configuration_page(schema: Schema) -> str:
    """Return the page: the fields of the file, a table for each section, and the params of the built-in workloads."""
    definitions: Mapping[str, Schema] = schema["$defs"]
    sections = {
        name: target for name, field in schema["properties"].items() if (target := _section(field, definitions))
    }
    plain = {name: field for name, field in schema["properties"].items() if name not in sections or "oneOf" in field}
    required = schema.get("required", ())
    parts = [_HEAD, "## The file\n", _table(plain, "", definitions, required)]
    for name, target in sections.items():
        parts += [f"## `{name}`\n", *_described(definitions[target]), *_tables(target, f"{name}.", definitions)]
    for target in sorted(definitions):
        if target.endswith(".params"):
            workload = target.removesuffix(".params")
            parts += [f"## `params` of `{workload}`\n", *_tables(target, "params.", definitions)]
    return "\n".join(parts)


def _described(definition: Schema) -> list[str]:
    return [f"{definition['description'].splitlines()[0]}\n"] if definition.get("description") else []


def _tables(name: str, prefix: str, definitions: Mapping[str, Schema]) -> list[str]:
    """The table of a section, and below it those of the sections in it."""
    definition = definitions[name]
    fields: Mapping[str, Schema] = definition.get("properties", {})
    tables = [_table(fields, prefix, definitions, definition.get("required", ()))]
    for field, value in fields.items():
        if inner := _section(value, definitions):
            tables += [f"### `{prefix}{field}`\n", *_described(definitions[inner])]
            tables += _tables(inner, f"{prefix}{field}.", definitions)
    return tables


def _section(field: Schema, definitions: Mapping[str, Schema]) -> str:
    """The definition that a field refers to, alone or as the one object among its forms; "" if it has no fields."""
    if "additionalProperties" in field:  # a mapping with keys of the user
        return ""
    forms = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    names = [form["$ref"].rpartition("/")[2] for form in forms if "$ref" in form]
    return names[0] if len(names) == 1 and definitions[names[0]].get("properties") else ""


def _table(fields: Mapping[str, Schema], prefix: str, definitions: Mapping[str, Schema], required: Any) -> str:
    rows = [
        f"| `{prefix}{name}` | {_cell(_values(field, definitions))} | {_default(field, name in required, definitions)} "
        f"| {_cell(field.get('description', ''))} |"
        for name, field in fields.items()
    ]
    return _FIELDS + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: Schema, required: bool, definitions: Mapping[str, Schema]) -> str:
    if required:
        return "required"
    if "default" not in field or (_section(field, definitions) and isinstance(field["default"], dict)):
        return ""
    return f"`{json.dumps(field['default'])}`"


def _values(field: Schema, definitions: Mapping[str, Schema]) -> str:
    """The values that a field accepts, in words."""
    if forms := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(text for form in forms if (text := _values(form, definitions))))
    if "$ref" in field:
        target = definitions[field["$ref"].rpartition("/")[2]]
        return _values(target, definitions) if "enum" in target else "section"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in field["enum"])
    kind = str(field.get("type", "anything")).replace("object", "mapping").replace("array", "list")
    limits = [f"{words} {_number(field[key])}" for key, words in _LIMITS.items() if key in field]
    items = field.get("items")
    inner = f" of {_values(items, definitions)}" if kind == "list" and items else ""
    return f"{kind}{inner}{', ' if limits else ''}{', '.join(limits)}"


def _number(value: float) -> str:
    """The number without an exponent, as 31,536,000."""
    return f"{int(value):,}" if value == int(value) else str(value)


def main() -> int:
    TARGET.write_text(configuration_page(config_schema()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
