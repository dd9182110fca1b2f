"""Decodes JSON data into frozen dataclasses. Each field must have the declared type; no other field may occur."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

_JSON_TYPES = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


class UnknownFields(ValueError):
    """The data have fields that the dataclass does not have; the sender is probably of another version."""


class JsonMessage:
    """Base of the dataclasses that travel as JSON text."""

    def to_json(self) -> str:
        """The message as one line."""
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises UnknownFields or ValueError if the text is no such message."""
        try:
            decoded: Self = decode_json_data(cls, json.loads(text))
        except RecursionError as error:
            raise ValueError("the text is nested too deeply") from error
        return decoded


def decode_json_data(hint: Any, data: object, name: str = "") -> Any:
    """Return `data` as a value of the type `hint`; `name` is the field's name in errors.

    Supports dataclasses, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, Any and the scalar types.

    Raises:
        UnknownFields: a dataclass has no such field.
        ValueError: a field is missing or has another type. The text names the field.
    """
    if hint is Any:
        return data
    if get_origin(hint) is UnionType:
        return None if data is None else decode_json_data(get_args(hint)[0], data, name)
    if get_origin(hint) is tuple:
        items = _expect(list, data, name, "a list")
        return tuple(decode_json_data(get_args(hint)[0], item, f"{name}[{i}]") for i, item in enumerate(items))
    if get_origin(hint) is Mapping:
        items = _expect(dict, data, name, "a mapping")
        return {key: decode_json_data(get_args(hint)[1], item, f"{name}.{key}") for key, item in items.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, _expect(dict, data, name, "a mapping"), name)
    if hint is float and type(data) is int:
        return float(data)
    return _expect(hint, data, name, _JSON_TYPES[hint])


def _expect(kind: Any, data: object, name: str, words: str) -> Any:
    if type(data) is not kind:
        raise ValueError(f"{name or 'the message'} must be {words}, got {str(data)[:100]!r}")
    return data


def _decode_dataclass(cls: Any, data: Mapping[str, object], name: str) -> Any:
    hints = _hints(cls)
    prefix = f"{name}." if name else ""
    if unknown := sorted(data.keys() - hints.keys()):
        raise UnknownFields(", ".join(prefix + field for field in unknown))
    values = {field: decode_json_data(hints[field], value, prefix + field) for field, value in data.items()}
    try:
        return cls(**values)
    except TypeError as error:  # the constructor names the fields that are missing
        raise ValueError(f"{name or cls.__name__}: {error}") from error


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
