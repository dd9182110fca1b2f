"""Decodes JSON data into frozen dataclasses. Each field must have the declared type; no other field may occur."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

_JSON_TYPES = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


class UnknownFields(ValueError):
    """The data have fields that the dataclass does not have; the sender probably has another version."""


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a dataclass. dataclasses.asdict would also copy all nested values."""
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


_ENCODER = json.JSONEncoder(default=_fields)


class JsonMessage:
    """Base of the dataclasses that travel as JSON text."""

    def to_json(self) -> str:
        """Return the message as one line."""
        return _ENCODER.encode(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode a message. Raises UnknownFields, or ValueError if the text is not such a message."""
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
    return _decoder(hint)(data, name)


def decode_known_fields(cls: Any, data: Mapping[str, Any]) -> Any:
    """Decode as decode_json_data does; ignore fields that the dataclass does not have, as newer versions may add."""
    return decode_json_data(cls, {name: value for name, value in data.items() if name in cls.__dataclass_fields__})


_Decoder = Callable[[object, str], Any]


@functools.cache  # a run with many ranks decodes the same types thousands of times
def _decoder(hint: Any) -> _Decoder:
    """Return the function that decodes a value of the type `hint`; its arguments are the data and the field's name."""
    if hint is Any:
        return lambda data, name: data
    if get_origin(hint) is UnionType:
        decode = _decoder(get_args(hint)[0])
        return lambda data, name: None if data is None else decode(data, name)
    if get_origin(hint) is tuple:
        return functools.partial(_decode_tuple, _decoder(get_args(hint)[0]))
    if get_origin(hint) is Mapping:
        return functools.partial(_decode_mapping, get_args(hint)[1])
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        decoders = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(hint)}
        return functools.partial(_decode_dataclass, hint, decoders)
    return functools.partial(_expect, hint)


def _expect(kind: Any, data: object, name: str) -> Any:
    if type(data) is not kind:
        if kind is float and type(data) is int:
            return float(data)
        raise ValueError(f"{name or 'the message'} must be {_JSON_TYPES[kind]}, got {str(data)[:100]!r}")
    return data


def _decode_tuple(decode: _Decoder, data: object, name: str) -> Any:
    return tuple(decode(item, f"{name}[{i}]") for i, item in enumerate(_expect(list, data, name)))


def _decode_mapping(hint: Any, data: object, name: str) -> Any:
    items = _expect(dict, data, name)
    if hint is str and all(type(item) is str for item in items.values()):
        return items
    if hint is float:  # records have null for a number that is not finite, because JSON has none
        items = {key: math.nan if item is None else item for key, item in items.items()}
    decode = _decoder(hint)
    return {key: decode(item, f"{name}.{key}") for key, item in items.items()}


def _decode_dataclass(cls: Any, decoders: Mapping[str, _Decoder], data: object, name: str) -> Any:
    items = _expect(dict, data, name)
    prefix = f"{name}." if name else ""
    if unknown := sorted(items.keys() - decoders.keys()):
        raise UnknownFields(", ".join(prefix + field for field in unknown))
    values = {field: decoders[field](value, prefix + field) for field, value in items.items()}
    try:
        return cls(**values)
    except TypeError as error:  # the constructor names the fields that are missing
        raise ValueError(f"{name or cls.__name__}: {error}") from error


# --- for frequent messages: the types of fields and of the items of mappings, looked up once ---

_Kinds = frozenset[type]
FieldCheck = tuple[_Kinds, _Kinds, str]
_SCALARS: dict[str, set[type]] = {"int": {int}, "float": {int, float}, "bool": {bool}, "str": {str}}


def field_checks(cls: Any) -> dict[str, FieldCheck]:
    """Return the checks for known_fields(), of a dataclass whose annotations are text."""
    return {field.name: _check_of(str(field.type)) for field in dataclasses.fields(cls)}


def known_fields(checks: Mapping[str, FieldCheck], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a check. Raises TypeError if the JSON type of one is not the declared type."""
    known = {}
    for name, value in fields.items():
        if (check := checks.get(name)) is not None:
            kinds, of_items, declared = check
            if type(value) not in kinds or (of_items and not of_items.issuperset(map(type, value.values()))):
                raise TypeError(f"{name} is {value!r}, not {declared}")
            known[name] = value
    return known


def _check_of(declared: str) -> FieldCheck:
    """Return the Python types of a field's JSON value and of its items (empty: not checked), and the type as text."""
    name, _, optional = declared.partition(" | ")
    if name.startswith("Mapping[str, "):
        items = frozenset(_SCALARS.get(name[len("Mapping[str, ") : -1], ()))
        return frozenset({dict}), items, declared
    kinds = _SCALARS.get(name, {dict, tuple}) | ({type(None)} if optional else set())
    return frozenset(kinds), frozenset(), declared


def parse_integer(digits: str) -> int:
    """Return an integer. Raises ValueError for more than 64 bits, which a float could not hold."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits[:40]} is too large")
    return number
