"""Finds the user's function, checks its params against its type hints, and converts what it returns to JSON."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddptrain.config.registry import takes_context

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ddptrain.rank.context import RankContext

MAX_RESULT_BYTES = 64 << 10


class WrongParams(TypeError):
    """The params do not match the function's signature."""


def load_function(target: str) -> Callable[..., Any]:
    """Import the function "package.module:function".

    Raises:
        ImportError: the module is missing; the message names the interpreter and sys.path.
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not a function.
    """
    module_name, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        root = module_name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"workload {target!r}: no module {error.name!r} for {sys.executable}, sys.path {sys.path}", name=error.name
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            public = sorted(attr for attr, value in vars(found).items() if callable(value) and not attr.startswith("_"))
            raise AttributeError(
                f"workload {target!r}: {found!r} has no {part!r}; it has {', '.join(public) or 'nothing'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"workload {target!r} is {found!r}, not a function")
    return found  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[[RankContext], Any]:
    """The function with its params, to be called with the context alone.

    Raises:
        WrongParams: the message names each wrong params.<key>.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled functions may have no signature
        return lambda ctx: function(ctx, **params)
    with_context = bool(parameters) and _is_for_context(parameters[0])
    own = parameters[1:] if with_context and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL else parameters
    call = _bound(function, own, params)
    return call if with_context else lambda ctx: call()


def _is_for_context(first: inspect.Parameter) -> bool:
    """Also true for *args: it can belong to a decorator that passes its arguments on."""
    if first.kind is inspect.Parameter.VAR_POSITIONAL:
        return True
    hint = first.annotation
    name = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    by_position = first.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return by_position and takes_context(first.name, name)


def _bound(
    function: Callable[..., Any], parameters: list[inspect.Parameter], params: Mapping[str, Any]
) -> Callable[..., Any]:
    hints = _hints(function)
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if len(named) == 1 and not is_open and _is_model(model := hints.get(named[0].name)):
        return functools.partial(function, **{named[0].name: _built(model, params)})
    optional = {each.name for each in named if each.default is not each.empty}
    checks = _wrong_names([each.name for each in named], optional, params, is_open=is_open)
    kinds = {each.name: _kind(each, hints) for each in named if each.name in hints}
    values, wrong = _checked(kinds, params)
    _refuse([*checks, *wrong])
    return functools.partial(function, **{**params, **values})


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The type hints. If one cannot be resolved (a name for type checkers only), hints that are texts are left out."""
    target = inspect.unwrap(function)
    target = target if inspect.isroutine(target) else getattr(type(target), "__call__", target)  # noqa: B004
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # the user's annotations may raise anything
        raw = getattr(target, "__annotations__", {})
        return {name: hint for name, hint in raw.items() if not isinstance(hint, str)}


def _kind(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    kind = hints[parameter.name]
    try:
        return kind | None if parameter.default is None else kind  # for lr: float = None
    except TypeError:
        return Any


def _is_model(hint: Any) -> bool:
    from pydantic import BaseModel

    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel))


def _built(model: Any, params: Mapping[str, Any]) -> Any:
    """The dataclass or pydantic model, built from all params."""
    names, required, is_open = _fields(model)
    _refuse(_wrong_names(names, set(names) - required, params, is_open=is_open))
    return _one_value(model, dict(params), ())


def _fields(model: Any) -> tuple[list[str], set[str], bool]:
    """The names of all fields, those of the required ones, and whether other names are allowed, too."""
    if dataclasses.is_dataclass(model):
        fields = [field for field in dataclasses.fields(model) if field.init]
        missing = dataclasses.MISSING
        required = {each.name for each in fields if each.default is missing and each.default_factory is missing}
        return [field.name for field in fields], required, False
    aliased = any(field.validation_alias or field.alias for field in model.model_fields.values())
    is_open = aliased or model.model_config.get("extra") == "allow"
    return list(model.model_fields), set(), is_open


def _wrong_names(names: list[str], optional: set[str], params: Mapping[str, Any], *, is_open: bool) -> Iterator[str]:
    from ddptrain.config.wording import did_you_mean

    for key in params if not is_open else ():
        if key not in names:
            hint = did_you_mean(key, names)
            yield f"params.{key}: unknown key" + (f" ({hint})" if hint else "")
    for name in names if not is_open else ():
        if name not in params and name not in optional:
            yield f"params.{name}: is required, and not given"


def _checked(kinds: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values converted to their types, and the errors."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for name, kind in kinds.items():
        if name in params:
            try:
                values[name] = _one_value(kind, params[name], (name,))
            except WrongParams as error:
                wrong.append(str(error))
    return values, wrong


def _one_value(kind: Any, value: Any, path: tuple[str, ...]) -> Any:
    """The value converted to its type, as in pydantic's strict mode for JSON: 1 is a float, "1" is not a number.

    Raises WrongParams if the value does not fit.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError

    try:
        adapter = TypeAdapter(kind)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError, TypeError):
        return kind(**value) if not path else value  # a type that pydantic does not know: the function has to check it
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise WrongParams("\n".join(_explained(error, value, path))) from None


def _explained(error: Any, value: Any, path: tuple[str, ...]) -> Iterator[str]:
    """pydantic's errors as messages like those for the configuration."""
    from ddptrain.config.models import RunConfig
    from ddptrain.config.problems import Schema, explain
    from ddptrain.config.yaml import Node, Place

    place = Place(0, 0, 0, "")

    def nodes(item: Any) -> Node:
        if isinstance(item, dict):
            return Node(place, {key: nodes(below) for key, below in item.items()})
        return Node(place, [nodes(below) for below in item] if isinstance(item, list | tuple) else item)

    root: Any = value
    for name in reversed(("params", *path)):
        root = {name: root}
    for located in explain(error, nodes(root), Schema(RunConfig, None), ("params", *path)):
        problem = located.problem
        yield f"{problem.key}: {problem.message}" + (f" ({problem.hint})" if problem.hint else "")


def _refuse(wrong: list[str] | Iterator[str]) -> None:
    if messages := list(wrong):
        raise WrongParams("\n".join(messages))


def as_json(value: Any) -> str:
    """A function's return value as JSON; dataclasses, pydantic models, and tensors with one element are converted.

    Raises:
        ValueError, TypeError: it cannot be converted, or has more than 64 kB.
    """
    text = json.dumps(value, default=_plain)
    if len(text.encode("utf-8", "backslashreplace")) > MAX_RESULT_BYTES:
        raise ValueError(f"it is {len(text):,} characters long: at most {MAX_RESULT_BYTES:,} are kept")
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    model: BaseModel | Any = value
    if hasattr(model, "model_dump"):
        return model.model_dump(mode="json")
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")
