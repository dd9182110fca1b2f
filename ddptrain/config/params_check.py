"""Checks params against what a function takes: the same check before the run, and in the rank that calls the function.

The driver reads the parameters from the source (config/function_signature.py), the rank from the imported function
(rank/entrypoint.py). Both get a model of the parameters here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

UNKNOWN = inspect.Parameter.empty  # a default that only the imported module has, such as lr=BASE_LR


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or field of a model: its type (Any if it is unknown), and its default if it may be left out."""

    name: str
    type: Any
    optional: bool
    default: Any = UNKNOWN


def field_name(number: int) -> str:
    """Return the name of the model's field for the parameter with that index."""
    return f"p{number}"


def make_model(parameters: Sequence[Parameter], *, extra: bool) -> type[BaseModel]:
    """Return a model of the params; `extra` allows others. Aliases, because no field may be named copy, or _x."""
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        default: dict[str, Any] = {"default": parameter.default} if parameter.optional else {}
        fields[field_name(number)] = (parameter.type, Field(alias=parameter.name, **default))
    settings = ConfigDict(extra="allow" if extra else "forbid", strict=True)
    return create_model("Params", __config__=settings, **fields)


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of the params as far as they are known."""
    fields = {field.alias or name: field for name, field in model.model_fields.items() if not field.is_required()}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name: value for name, value in defaults.items() if value is not UNKNOWN}


def check_params(model: type[BaseModel], params: Mapping[str, Any]) -> BaseModel:
    """Return the params as their model; in strict mode a list may become a tuple. Raises pydantic's ValidationError."""
    return model.model_validate_json(json.dumps(params), strict=True)


def describe(error: ValidationError, params: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """Return what is wrong with the params, one line for each key, in the form of the configuration's errors."""
    from ddptrain.config.run_config import RunConfig
    from ddptrain.config.validation_errors import Schema, explain
    from ddptrain.config.yaml_reader import Document

    problems = explain(error, Document("", {"params": params}), Schema(RunConfig, model), ("params",))
    return "\n".join(str(problem) for problem in problems)
