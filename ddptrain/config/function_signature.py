"""Reads the parameters of a function from its source, with ast: the driver imports neither user code nor torch.

What the source does not show (decorators, **kwargs, types defined elsewhere) is not an error: the rank, which imports
the function, checks the params again (rank/entrypoint.py).
"""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ddptrain.config import plugin_names
from ddptrain.config.plugin_names import takes_context, workload_target

_MAX_BYTES = 1 << 20
_SIMPLE: Mapping[str, Any] = types.MappingProxyType(
    {
        **{kind.__name__: kind for kind in (int, float, str, bool, list, dict)},
        "tuple": tuple[Any, ...],
        "List": list,
        "Dict": dict,
        "Tuple": tuple[Any, ...],
        "Mapping": dict,
    }
)
_UNREADABLE = (OSError, ValueError, RecursionError, MemoryError)
_HARMLESS_DECORATORS = frozenset({"record"})  # of torch elastic; it does not change the signature
UNKNOWN = inspect.Parameter.empty  # a default that only the imported module has, such as lr=BASE_LR


@dataclass(frozen=True, slots=True)
class Found:
    """The parsed source of a module, and its file."""

    path: Path
    tree: ast.Module


def find_source(module: str, folders: Sequence[str]) -> Found | None:
    """Return the source of a module, searched as an import does; None if it is not found or not readable."""
    path = _find_file(module, folders)
    try:
        return Found(path, ast.parse(_read(path))) if path is not None else None
    except (SyntaxError, *_UNREADABLE):
        return None


def syntax_error(module: str, folders: Sequence[str]) -> SyntaxError | None:
    """Return the error of a module, or of a package around it, that is no valid Python; None if there is none."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        path = _find_file(".".join(parts[:count]), folders)
        if path is not None and (error := syntax_error_of_file(path)) is not None:
            return error
    return None


def syntax_error_of_file(path: Path) -> SyntaxError | None:
    """Return the error of a file that is no valid Python; None if there is none, or the file can't be read."""
    try:
        compile(_read(path), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except _UNREADABLE:
        pass
    return None


def _find_file(module: str, folders: Sequence[str]) -> Path | None:
    first, *rest = module.split(".")
    for folder in folders:
        top = Path(folder or ".") / first
        top_files = [path for path in (top / "__init__.py", top.with_suffix(".py")) if path.is_file()]
        whole = top.joinpath(*rest)
        inside = [path for path in (whole / "__init__.py", whole.parent / f"{whole.name}.py") if path.is_file()]
        if inside:
            return inside[0]
        if top_files:
            return None  # an import does not search the other folders
    return None


def _read(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("longer than source code is")
    return path.read_bytes()


def names_in(source: Found) -> list[str] | None:
    """Return the names that the module defines; None if there may be others (a star import, __getattr__)."""
    names: list[str] = []
    for node in _statements(source.tree.body):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        names += _bound(node)
    calls = (node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    return None if {"__getattr__", "globals", "exec"} & {*names, *called} else names


def is_module(source: Found, name: str) -> bool:
    """Return whether the only statement that defines the name is `import name`."""
    nodes = [node for node in _statements(source.tree.body) if name in _bound(node)]
    return len(nodes) == 1 and isinstance(nodes[0], ast.Import)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, including those in if, try, with and loops."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, block, []))
        for handler in getattr(node, "handlers", []) + getattr(node, "cases", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = [part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
    return [target.id for target in targets]


def params_model(source: Found, function: str) -> type[BaseModel] | None:
    """Return a model of the params that a function of the module takes; None if the source does not show them."""
    defined = [node for node in _statements(source.tree.body) if function in _bound(node)]
    if len(defined) != 1 or not isinstance(defined[0], ast.FunctionDef):
        return None
    if not all(_last_name(decorator) in _HARMLESS_DECORATORS for decorator in defined[0].decorator_list):
        return None
    arguments = defined[0].args
    given = _without_context(arguments)
    if given is None or (arguments.vararg is not None and not given):
        return None
    if len(given) == 1 and arguments.kwarg is None and _may_be_model(hint := given[0][0].annotation):
        cls = _class_named(source, hint)
        return _model_of_class(cls) if cls is not None else None
    parameters = [_parameter(argument.arg, argument.annotation, default) for argument, default in given]
    return make_model(parameters, extra=arguments.kwarg is not None)


def default_params(workload: str, folders: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of a workload's params, as far as its source shows them."""
    model = plugin_names.params_model(workload)
    if model is None:
        module, _, function = workload_target(workload).partition(":")
        source = find_source(module, folders)
        model = params_model(source, function) if source is not None else None
    return defaults_of(model) if model is not None else {}


def _without_context(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]] | None:
    """Return parameters and their defaults, without the one for the context."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = list(zip(positional, defaults, strict=True))
    if pairs and takes_context(pairs[0][0].arg, _text(pairs[0][0].annotation)):
        pairs = pairs[1:]
    if any(argument in arguments.posonlyargs for argument, _ in pairs):
        return None
    return [*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if node is not None else ""


def _parameter(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Parameter:
    kind = _type(annotation)
    if isinstance(default, ast.Constant) and default.value is None and kind is not Any:
        kind = kind | None  # as in lr: float = None
    return Parameter(name, kind, default is not None, _literal(default))


def _literal(node: ast.expr | None) -> Any:
    """Return the value of an expression without names; else UNKNOWN."""
    try:
        return ast.literal_eval(node) if node is not None else UNKNOWN
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # of literal_eval
        return UNKNOWN


# --- a dataclass or a pydantic model that holds all params ---


def _may_be_model(annotation: ast.expr | None) -> bool:
    return annotation is not None and _type(annotation) is Any and _last_name(annotation) != "Any"


def _class_named(source: Found, annotation: ast.expr | None) -> ast.ClassDef | None:
    """Return the class of the model, if the same module defines it."""
    name = _text(annotation)
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(classes) != 1 or not (_is_dataclass(classes[0]) or _is_model(classes[0])):
        return None
    return classes[0]


def _is_dataclass(cls: ast.ClassDef) -> bool:
    return any(_last_name(decorator) == "dataclass" for decorator in cls.decorator_list)


def _is_model(cls: ast.ClassDef) -> bool:
    return any(_last_name(base) == "BaseModel" for base in cls.bases)


def _model_of_class(cls: ast.ClassDef) -> type[BaseModel] | None:
    """Return a model of the class; None if fields may be inherited, renamed or changed by code."""
    plain_bases = {"BaseModel"} if _is_model(cls) else set()
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    special = [node for node in methods if node.decorator_list or node.name in ("__init__", "__new__")]
    settings = [node for node in cls.body if "model_config" in _bound(node) or "Config" in _bound(node)]
    if {_last_name(base) for base in cls.bases} - plain_bases or cls.keywords or special or settings:
        return None
    if len(cls.decorator_list) != (0 if _is_model(cls) else 1):
        return None
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    if any(_last_name(node.annotation) in ("ClassVar", "InitVar") or _is_renamed(node.value) for node in fields):
        return None
    return make_model([_field(node) for node in fields], extra=False)


def _is_renamed(value: ast.expr | None) -> bool:
    words = {keyword.arg or "" for keyword in value.keywords} if isinstance(value, ast.Call) else set()
    return bool(words & {"alias", "validation_alias", "init", ""})


def _field(node: ast.AnnAssign) -> Parameter:
    assert isinstance(node.target, ast.Name)
    value = node.value
    if isinstance(value, ast.Call) and _last_name(value.func) in ("field", "Field"):
        has_default = any(word.arg in ("default", "default_factory") for word in value.keywords)
        first = value.args[0] if value.args else None
        is_given = has_default or (first is not None and _text(first) != "...")
        return Parameter(node.target.id, _type(node.annotation), is_given)
    return _parameter(node.target.id, node.annotation, value)


# --- types ---


def _last_name(node: ast.expr) -> str:
    """Return the last name of an expression: `dataclass` for dataclasses.dataclass(frozen=True)."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _type(node: ast.expr | None) -> Any:
    """Return the type of an annotation; Any if it is not one of YAML's types."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _type(ast.parse(node.value, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            return Any
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right])
    if isinstance(node, ast.Subscript):
        return _generic(_last_name(node.value), node.slice)
    return _SIMPLE.get(_last_name(node), Any) if isinstance(node, ast.Name | ast.Attribute) else Any


def _generic(name: str, inside: ast.expr) -> Any:
    members = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        values = [member.value for member in members if isinstance(member, ast.Constant)]
        return Literal[tuple(values)] if len(values) == len(members) else Any
    if name == "Optional":
        return _union([inside, ast.Constant(None)])
    if name == "Union":
        return _union(members)
    if name in ("list", "List"):
        return list[_type(inside)]  # type: ignore[misc]  # a type created at run time
    return _SIMPLE.get(name, Any)


def _union(members: Sequence[ast.expr]) -> Any:
    kinds = [_type(member) for member in members]
    return Any if Any in kinds else Union[tuple(kinds)]  # noqa: UP007  # a type created at run time


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
