"""Decoding of JSON data into dataclasses: types are checked, errors name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ddptrain.protocol.typed_json import UnknownFields, decode_json_data


@dataclass(frozen=True)
class Inner:
    name: str
    size: float = 1.0


@dataclass(frozen=True)
class Outer:
    items: tuple[Inner, ...]
    by_name: Mapping[str, int]
    free: Any = None
    maybe: Inner | None = None


def test_nested_data_are_decoded() -> None:
    data = {"items": [{"name": "a", "size": 2}], "by_name": {"x": 1}, "free": [1, {}], "maybe": {"name": "b"}}
    assert decode_json_data(Outer, data) == Outer((Inner("a", 2.0),), {"x": 1}, [1, {}], Inner("b"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the message must be a mapping, got '[]'"),
        ({"items": {}, "by_name": {}}, "items must be a list, got '{}'"),
        ({"items": [1], "by_name": {}}, "items[0] must be a mapping, got '1'"),
        ({"items": [{"name": 1}], "by_name": {}}, "items[0].name must be text, got '1'"),
        ({"items": [{"name": "a", "size": True}], "by_name": {}}, "items[0].size must be a number, got 'True'"),
        ({"items": [], "by_name": {"x": 1.0}}, "by_name.x must be an integer, got '1.0'"),
    ],
)
def test_wrong_type_is_refused_with_the_name_of_the_field(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode_json_data(Outer, data)


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Outer: .*'by_name'"):
        decode_json_data(Outer, {"items": []})
    with pytest.raises(UnknownFields, match=r"^maybe\.a, maybe\.b$"):
        decode_json_data(Outer, {"items": [], "by_name": {}, "maybe": {"name": "x", "b": 1, "a": 2}})
