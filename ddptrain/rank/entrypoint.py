"""Finds the user's function, checks its params against its type hints, and converts its return value to JSON."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddptrain.config.plugin_names import takes_context

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter

    from ddptrain.config.function_signature import Parameter
    from ddptrain.rank.context import RankContext

MAX_RESULT_BYTES = 64 << 10


class WrongParams(TypeError):
    """The params do not match the function's signature."""


def load_function(target: str) -> Callable[..., Any]:
    """Import the function "package.module:function".

    Raises:
        ImportError: the module is missing; the message names the interpreter and the first folders.
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not callable.
    """
    module_name, _, name = target.partition(":")
    try:
        item: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        root = module_name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"workload {target!r}: no module {error.name!r} for {sys.executable}; it was looked for in "
            f"{' and '.join(dict.fromkeys(sys.path[:2]))} and in the rest of sys.path",
            name=error.name,
        ) from None
    for part in name.split("."):
        if not hasattr(item, part):
            public = sorted(attr for attr, value in vars(item).items() if callable(value) and not attr.startswith("_"))
            raise AttributeError(
                f"workload {target!r}: {item!r} has no {part!r}; it has {', '.join(public) or 'nothing'}"
            )
        item = getattr(item, part)
    if not callable(item):
        raise TypeError(f"workload {target!r} is {item!r}, not a function")
    return item  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[[RankContext], Any]:
    """Bind the params to the function; return a function whose only argument is the context.

    Raises:
        WrongParams: the message names each wrong params.<key>.
    """
    try:
        parameters = list(_signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled functions may have no signature
        return lambda ctx: function(ctx, **params)
    with_context = bool(parameters) and _is_for_context(parameters[0])
    is_explicit = with_context and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    call = _bound(function, parameters[1:] if is_explicit else parameters, params)
    return call if with_context else lambda ctx: call()


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature; type hints may be names that exist for type checkers only."""
    if sys.version_info >= (3, 14):  # hints are evaluated on request
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)


def _is_for_context(first: inspect.Parameter) -> bool:
    """Return whether the first parameter takes the context; also for *args, which may be that of a decorator."""
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
    extra = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if len(named) == 1 and not extra and _is_model(model := hints.get(named[0].name)):
        return functools.partial(function, **{named[0].name: _built(model, params)})
    if not named and (extra or not params):
        return functools.partial(function, **params)
    return functools.partial(function, **_checked(named, hints, params, extra=extra))


def _checked(
    named: list[inspect.Parameter], hints: Mapping[str, Any], params: Mapping[str, Any], *, extra: bool
) -> dict[str, Any]:
    """Return the params, those with a type hint converted to it. Raises WrongParams."""
    from ddptrain.config.function_signature import Parameter, field_name

    expected = [Parameter(each.name, _kind(each, hints), each.default is not each.empty) for each in named]
    values = _validated(expected, params, extra=extra)
    converted = {
        each.name: getattr(values, field_name(number))
        for number, each in enumerate(expected)
        if each.name in params and each.type is not Any
    }
    return {**params, **converted}


def _validated(expected: list[Parameter], params: Mapping[str, Any], *, extra: bool) -> BaseModel:
    from pydantic import ValidationError

    from ddptrain.config.function_signature import check_params, describe, make_model

    model = make_model(expected, extra=extra)
    try:
        return check_params(model, params)
    except ValidationError as error:
        raise WrongParams(describe(error, params, model)) from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints. If one cannot be resolved (a name for type checkers only), omit all that are texts."""
    target = inspect.unwrap(function)
    target = target if inspect.isroutine(target) else getattr(type(target), "__call__", target)  # noqa: B004
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # the user's annotations may raise anything
        return {name: hint for name, hint in _annotations(target).items() if not isinstance(hint, str)}


def _annotations(target: Any) -> Mapping[str, Any]:
    """Return the annotations; from Python 3.14 on those that can be evaluated."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, ForwardRef, get_annotations

        found = get_annotations(target, format=Format.FORWARDREF)
        return {name: hint for name, hint in found.items() if not isinstance(hint, ForwardRef)}
    return getattr(target, "__annotations__", {})


def _kind(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    """Return the type hint of a parameter; Any if it has none, or if pydantic cannot check the type."""
    kind = hints.get(parameter.name, Any)
    try:
        kind = kind | None if parameter.default is None and kind is not Any else kind  # for example lr: float = None
        return kind if _adapter(kind) is not None else Any
    except TypeError:
        return Any


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """Return pydantic's validator for a type; None if there is none, as for a type of another library."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError

    try:
        adapter = TypeAdapter(kind)
        return adapter if adapter.pydantic_complete else None  # incomplete: a name that exists for type checkers only
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError, TypeError):
        return None


def _is_model(hint: Any) -> bool:
    from pydantic import BaseModel

    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel))


def _built(model: Any, params: Mapping[str, Any]) -> Any:
    """Create the dataclass or pydantic model from the params. Raises WrongParams."""
    from pydantic import ValidationError

    from ddptrain.config.function_signature import Parameter, describe

    names, required, extra = _fields(model)
    _validated([Parameter(name, Any, name not in required) for name in names], params, extra=extra)
    adapter = _adapter(model)
    if adapter is None:
        return model(**params)
    try:
        return adapter.validate_json(json.dumps(params), strict=True)
    except ValidationError as error:
        raise WrongParams(describe(error, params)) from None


def _fields(model: Any) -> tuple[list[str], set[str], bool]:
    """Return the names of all fields, the names of the required fields, and whether other names are allowed."""
    if dataclasses.is_dataclass(model):
        fields = [field for field in dataclasses.fields(model) if field.init]
        missing = dataclasses.MISSING
        required = {each.name for each in fields if each.default is missing and each.default_factory is missing}
        return [field.name for field in fields], required, False
    aliased = any(field.validation_alias or field.alias for field in model.model_fields.values())
    is_open = aliased or model.model_config.get("extra") == "allow"
    return list(model.model_fields), set(), is_open


def as_json(value: Any) -> str:
    """Return a return value as JSON text. Dataclasses, pydantic models and tensors with one element are converted.

    Raises:
        ValueError, TypeError: the value cannot be converted, or the text has more than 64 kB.
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
