"""The JSON schema of the configuration. Editors use it to complete and check the YAML."""

from __future__ import annotations

from typing import Any

from ddptrain.config import plugin_names
from ddptrain.config.run_config import RunConfig


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file; the schema of `params` depends on a built-in workload."""
    schema = RunConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    rules = []
    for name in plugin_names.BUILT_IN:
        model = plugin_names.params_model(name)
        if model is None:
            continue
        params = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        for below, definition in params.pop("$defs", {}).items():
            definitions[f"{name}.{below}"] = definition
        definitions[f"{name}.params"] = params
        rules.append(
            {
                "if": {"properties": {"workload": {"const": name}}, "required": ["workload"]},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{name}.params"}}},
            }
        )
    _describe_references(schema, definitions)
    schema["properties"]["workload"]["examples"] = [*plugin_names.BUILT_IN, "package.module:function"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "allOf": rules}


def _describe_references(schema: dict[str, Any], definitions: dict[str, dict[str, Any]]) -> None:
    """Give each field that refers to a definition a description, which pydantic leaves out if it is the same."""
    for owner in (schema, *definitions.values()):
        for field in owner.get("properties", {}).values():
            described = definitions.get(str(field.get("$ref")).removeprefix("#/$defs/"), {}).get("description")
            if described is not None:
                field.setdefault("description", described)
