"""Params are checked in the same way from a function's source, and in the rank from the imported function."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddptrain.config.function_signature import Parameter, check_params, describe, field_name, make_model
from ddptrain.config.load import load_mapping
from ddptrain.errors import ConfigError
from ddptrain.rank.entrypoint import WrongParams, bind

QUOTED = "(write the number without quotes, commas or underscores)"
SOURCE = """
def train(ctx, epochs: int, lr: float = 0.1, sizes: list[int] | None = None, copy: bool = False, how=None): ...
"""


@pytest.fixture
def module(tmp_path: Path) -> Any:
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("own", file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("params", "lines"),
    [
        (
            {"epochs": "3"},
            ['params.epochs: expected a whole number, got the text "3" (write the number without quotes'],
        ),
        ({"epochs": 1, "lr": True}, ["params.lr: expected a number, got true"]),
        ({"epochs": 1, "sizes": [1, "x"]}, ['params.sizes[1]: expected a whole number, got the text "x"']),
        ({"epochs": 1, "copy": 1}, ["params.copy: expected true or false, got 1"]),
        ({}, ["params.epochs: is required, and not given (write params.epochs: VALUE)"]),
        ({"epochs": 1, "epoch": 2}, ["params.epoch: unknown key (did you mean params.epochs?)"]),
    ],
)
def test_source_and_imported_function_refuse_with_the_same_words(
    tmp_path: Path, module: Any, params: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ConfigError) as before:
        load_mapping({"workload": "own:train", "params": params}, tmp_path, source="c")
    with pytest.raises(WrongParams) as inside:
        bind(module.train, params)
    assert str(before.value).replace("c: ", "") == str(inside.value)
    for line, expected in zip(str(inside.value).splitlines(), lines, strict=True):
        assert line.startswith(expected)


def test_good_params_are_taken_by_both(tmp_path: Path, module: Any) -> None:
    params = {"epochs": 3, "lr": 1, "sizes": None, "how": {"any": "thing"}}
    assert load_mapping({"workload": "own:train", "params": params}, tmp_path).config.params == params
    bind(module.train, params)


def test_model_knows_parameters_by_alias_and_converts_them() -> None:
    model = make_model([Parameter("_x", tuple[int, ...], False), Parameter("copy", float, True)], extra=False)
    values = check_params(model, {"_x": [1, 2]})
    assert getattr(values, field_name(0)) == (1, 2)
    assert values.model_fields_set == {field_name(0)}
    with pytest.raises(ValidationError) as refused:
        check_params(model, {"_x": ["1"], "more": 1})
    assert describe(refused.value, {"_x": ["1"], "more": 1}, model).splitlines() == [
        'params._x[0]: expected a whole number, got the text "1" ' + QUOTED,
        "params.more: unknown key (known are: _x, copy)",
    ]


def test_others_are_taken_only_if_they_are_allowed() -> None:
    assert check_params(make_model([], extra=True), {"a": 1}).model_dump() == {"a": 1}
    with pytest.raises(ValidationError):
        check_params(make_model([], extra=False), {"a": 1})
