"""A user's function gets the arguments of its signature, and wrong params are named before it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from ddptrain.rank.entrypoint import WrongParams, as_json, bind

CONTEXT: Any = "the context"


def called(function: Callable[..., Any], params: Mapping[str, Any] | None = None) -> Any:
    return bind(function, params or {})(CONTEXT)


def refused(function: Callable[..., Any], params: Mapping[str, Any]) -> str:
    with pytest.raises(WrongParams) as caught:
        bind(function, params)
    return str(caught.value)


def test_context_is_passed_to_functions_that_take_it() -> None:
    assert called(lambda ctx: ctx) == CONTEXT
    assert called(lambda _context: _context) == CONTEXT
    assert called(lambda *args: args) == (CONTEXT,)
    assert called(lambda: "nothing") == "nothing"
    assert called(lambda lr=1: lr) == 1

    def annotated(c: "RankContext", lr: float) -> Any:  # type: ignore[name-defined] # noqa: F821, UP037
        return c, lr

    assert called(annotated, {"lr": 2}) == (CONTEXT, 2)


def test_signature_of_a_wrapped_function_is_checked() -> None:
    def inner(ctx: Any, lr: float) -> Any:
        return ctx, lr

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    assert called(outer, {"lr": 1}) == (CONTEXT, 1)
    assert "params.rate: unknown key" in refused(outer, {"rate": 1})


def test_values_are_converted_to_their_types() -> None:
    def train(ctx: Any, path: Path, sizes: tuple[int, ...], lr: float, how: Literal["a"] = "a", more: Any = 3) -> Any:
        return path, sizes, lr, how, more

    train.__annotations__["more"] = int  # the default None below also allows None
    train.__defaults__ = ("a", None)
    params = {"path": "/data", "sizes": [1, 2], "lr": 1, "more": None}
    assert called(train, params) == (Path("/data"), (1, 2), 1.0, "a", None)


def test_all_wrong_values_are_named() -> None:
    def train(ctx: Any, epochs: int, lr: float, names: list[str] | None = None) -> None: ...

    said = refused(train, {"epochs": "3", "lr": True, "names": [1]}).splitlines()
    assert said[0].startswith('params.epochs: expected a whole number, got the text "3"')
    assert said[1].startswith("params.lr: expected a number, got true")
    assert said[2].startswith("params.names[0]: expected text, got 1")


def test_missing_and_unknown_names_are_named() -> None:
    def train(ctx: Any, epochs: int) -> None: ...

    assert refused(train, {"epoch": 3}).splitlines() == [
        "params.epochs: is required, and not given (write params.epochs: VALUE)",
        "params.epoch: unknown key (did you mean params.epochs?)",
    ]


def test_unknown_type_is_not_checked() -> None:
    class Odd:
        pass

    def train(ctx: Any, odd: Odd, other: "Unknown", n: int = 1) -> Any:  # type: ignore[name-defined] # noqa: F821, UP037
        return odd, other, n

    assert called(train, {"odd": 1, "other": 2}) == (1, 2, 1)


@dataclass(frozen=True)
class Settings:
    lr: float
    names: list[str] = field(default_factory=list)


class Model(BaseModel):
    lr: float
    names: list[str] = []


@pytest.mark.parametrize("kind", [Settings, Model])
def test_model_is_built_from_all_params(kind: Any) -> None:
    def train(ctx: Any, settings: Any) -> Any:
        return settings

    train.__annotations__["settings"] = kind
    built = called(train, {"lr": 1})
    assert isinstance(built, kind) and (built.lr, built.names) == (1.0, [])
    assert "params.rate: unknown key" in refused(train, {"lr": 1, "rate": 1})
    assert "params.lr: expected a number" in refused(train, {"lr": "x"})
    assert "params.lr: is required" in refused(train, {})


def test_result_that_is_not_json_is_refused() -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    assert (
        as_json({"loss": Scalar(), "settings": Settings(1.0)}) == '{"loss": 0.5, "settings": {"lr": 1.0, "names": []}}'
    )
    with pytest.raises(TypeError, match="object is not JSON"):
        as_json(object())
    with pytest.raises(ValueError, match="at most 65,536 are kept"):
        as_json("x" * 70_000)


def test_context_is_passed_by_its_position_only() -> None:
    def keyword(*, ctx: int = 1) -> Any:
        return ctx

    def only(ctx: Any, /, lr: float = 1.0) -> Any:
        return ctx, lr

    assert called(keyword) == 1 and called(keyword, {"ctx": 2}) == 2
    assert called(only, {"lr": 2}) == (CONTEXT, 2.0)


class Open(BaseModel):
    model_config = {"extra": "allow"}
    lr: float = 0.5


class Aliased(BaseModel):
    rate: float = Field(alias="lr")


def test_model_that_takes_other_names_gets_them() -> None:
    def train(ctx: Any, settings: Any) -> Any:
        return settings

    train.__annotations__["settings"] = Open
    assert called(train, {"a": 1}).model_extra == {"a": 1} and called(train).lr == 0.5
    train.__annotations__["settings"] = Aliased
    assert called(train, {"lr": 2}).rate == 2.0


def test_dataclass_that_pydantic_cannot_check_is_built_as_it_is() -> None:
    class Odd:
        pass

    @dataclass
    class Options:
        odd: Odd
        hidden: int = field(default=3, init=False)

    def train(ctx: Any, options: Any) -> Any:
        return options

    train.__annotations__["options"] = Options
    assert called(train, {"odd": 1}).odd == 1
    assert "params.odd: is required" in refused(train, {})
    assert "params.hidden: unknown key" in refused(train, {"odd": 1, "hidden": 2})
