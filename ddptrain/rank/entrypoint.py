"""What a rank executes: the user's function, with params that fit its type hints, or a script, as Python runs it."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import importlib.machinery
import inspect
import json
import multiprocessing.process
import os
import runpy
import socket
import sys
import types
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import bare_process

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter, ValidationError

    from ddptrain.rank.context import RankContext

MAX_RESULT_BYTES = 64 << 10


class WrongParams(TypeError):
    """The params do not match the function's signature."""


def load_function(target: str) -> Callable[..., Any]:
    """Import the function "package.module:function".

    Raises:
        ImportError: the module is missing.
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not callable, or a call would not run it (async def, yield).
    """
    module_name, _, name = target.partition(":")
    item: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(item, part):
            public = sorted(attr for attr, value in vars(item).items() if callable(value) and not attr.startswith("_"))
            raise AttributeError(
                f"workload {target!r}: {item!r} has no {part!r}; it has {', '.join(public) or 'nothing'}"
            )
        item = getattr(item, part)
    if not callable(item):
        raise TypeError(f"workload {target!r} is {item!r}, not a function")
    if inspect.iscoroutinefunction(item) or inspect.isgeneratorfunction(item) or inspect.isasyncgenfunction(item):
        raise TypeError(f"workload {target!r} is defined by async def or has a yield: it must be a plain function")
    return item  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[[RankContext], Any]:
    """Bind the params to the function; return a function whose only argument is the context.

    Params are converted to their type hints, as far as pydantic knows the types. A function whose only parameter is a
    dataclass or a pydantic model gets all params in it.

    Raises:
        WrongParams: the message names each wrong params.<key>.
    """
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError):  # compiled functions may have no signature
        return lambda ctx: function(ctx, **params)
    with_context = bool(parameters) and _is_for_context(parameters[0])
    if with_context and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    values: Mapping[str, Any] = params
    if len(parameters) == 1 and _is_model(kind := parameters[0].annotation):
        values = {parameters[0].name: _built(kind, params)}
    elif params or parameters:
        values = _converted(parameters, params)
    call = functools.partial(function, **values)
    return call if with_context else lambda ctx: call()


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters; their type hints are texts (or ForwardRef) if one of them cannot be resolved.

    Raises TypeError or ValueError if the function has no signature.
    """
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except Exception:  # a name for type checkers only, or whatever else the user's annotations raise
        more: dict[str, Any] = {}
        if sys.version_info >= (3, 14):  # hints are evaluated on request
            from annotationlib import Format

            more["annotation_format"] = Format.FORWARDREF
        return list(inspect.signature(function, **more).parameters.values())


def _is_for_context(first: inspect.Parameter) -> bool:
    """Return whether the first parameter takes the context; also for *args, which may be that of a decorator."""
    if first.kind is first.VAR_POSITIONAL:
        return True
    hint = first.annotation
    name = hint if isinstance(hint, str) else getattr(hint, "__forward_arg__", getattr(hint, "__name__", str(hint)))
    is_context = name.strip("'\"").partition("|")[0].strip().rpartition(".")[2] == "RankContext"
    is_positional = first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return is_positional and (is_context or first.name.strip("_") in ("ctx", "context", ""))


def _converted(parameters: list[inspect.Parameter], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params, those with a type hint converted to it. Raises WrongParams."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    fields: dict[str, Any] = {}
    typed = {}
    for number, each in enumerate(named):  # the names are aliases, because no field may be named copy, or _x
        kind, default = _kind(each), {} if each.default is each.empty else {"default": each.default}
        fields[f"p{number}"] = (kind, Field(alias=each.name, **default))
        if kind is not Any:
            typed[each.name] = f"p{number}"
    extra: Literal["allow", "forbid"] = (
        "allow" if any(each.kind is each.VAR_KEYWORD for each in parameters) else "forbid"
    )
    model = create_model("Params", __config__=ConfigDict(extra=extra, strict=True), **fields)
    try:
        checked = model.model_validate_json(json.dumps(params), strict=True)  # in JSON a list may become a tuple
    except ValidationError as error:
        raise WrongParams(_describe(error, params, model)) from None
    return {name: getattr(checked, typed[name]) if name in typed else value for name, value in params.items()}


def _describe(error: ValidationError, params: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """Return what is wrong with the params, one line for each key, in the form of the configuration's errors."""
    from ddptrain.config.run_config import RunConfig
    from ddptrain.config.validation_errors import Schema, explain
    from ddptrain.config.yaml_reader import Document

    problems = explain(error, Document("", {"params": params}), Schema(RunConfig, model), ("params",))
    return "\n".join(map(str, problems))


def _kind(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter; Any if it has none, or if pydantic cannot check it."""
    hint = parameter.annotation
    if _adapter(hint) is None:
        return Any
    return Optional[hint] if parameter.default is None else hint  # noqa: UP045  # a type created at run time


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """Return pydantic's validator for a type; None if there is none, as for a type of another library or a text."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError

    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return None
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

    # The names first, because pydantic ignores unknown ones.
    _converted([each.replace(annotation=Any) for each in inspect.signature(model).parameters.values()], params)
    if (adapter := _adapter(model)) is None:
        return model(**params)
    try:
        return adapter.validate_json(json.dumps(params), strict=True)
    except ValidationError as error:
        raise WrongParams(_describe(error, params)) from None


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
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


# --- scripts and modules ---


def run_script(spec: RankSpec, before: Callable[[], None] = lambda: None) -> None:
    """Run the rank's program. `before` is called just before, when the program's modules can already be imported.

    Raises any exception of the program, including SystemExit.
    """
    # Python has set this when the rank server started. Spawned child processes use it to find __main__.
    multiprocessing.process.ORIGINAL_DIR = spec.code.workdir  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__cached__": None})
    if sys.version_info < (3, 14):  # from then on they are evaluated when the program asks for them
        main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])  # keeps the old module alive, whose functions are still executing
    # Pickles and spawned child processes look for the program's definitions under these names.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    module, code = spec.code.module, None
    sys.argv = [spec.code.script or "-m", *spec.code.args]
    sys.orig_argv = [sys.executable, "-u", *sys.argv[:1], *([module] if module else []), *spec.code.args]
    if spec.code.script:
        path = find_script(spec)
        if path.is_dir() or zipfile.is_zipfile(path):
            module = "__main__"
            sys.path.insert(0, str(path))
        else:
            sys.path.insert(0, str(path.resolve().parent))
            is_compiled, name = path.suffix == ".pyc", str(path)
            kind = importlib.machinery.SourcelessFileLoader if is_compiled else importlib.machinery.SourceFileLoader
            main.__file__, main.__loader__ = name, (loader := kind("__main__", name))
            code = loader.get_code("__main__") if is_compiled else loader.source_to_code(path.read_bytes(), name)
    forget_hidden_modules(sys.path[:1] if spec.code.script else [spec.code.workdir])
    before()
    if code is not None:
        exec(code, main.__dict__)  # noqa: S102  # the user's own program
    else:  # as Python does for -m, for a folder and for a zip file
        runpy._run_module_as_main(module, alter_argv=module == spec.code.module)  # type: ignore[attr-defined]  # noqa: SLF001


_kept: list[types.ModuleType] = []


def find_script(spec: RankSpec) -> Path:
    """Find the script in the folders of the user's code; return its path. Raises FileNotFoundError."""
    folders = dict.fromkeys((*spec.code.sys_path, spec.code.workdir))
    for folder in folders:
        path = Path(folder) / spec.code.script
        if path.exists():
            return Path(os.path.abspath(path))
    searched = f" (looked for in {', '.join(folders)})" if not os.path.isabs(spec.code.script) else ""
    raise FileNotFoundError(f"there is no script {spec.code.script} on host {socket.gethostname()}{searched}")


def forget_hidden_modules(folders: Iterable[str], needed: frozenset[str] = frozenset()) -> None:
    """Forget the modules that the rank server has imported and for which the user's folders have another file.

    A new process would import the user's. Modules in `needed`, torch and ddptrain itself stay.
    """
    kept = {"ddptrain", "torch", *needed, *bare_process.MODULES, *sys.builtin_module_names}
    for folder in dict.fromkeys(folders):
        names = {entry.partition(".")[0] for entry in os.listdir(folder)} if os.path.isdir(folder) else set()
        # Not a walk through all modules: to touch them would copy the memory that the fork shares with the server.
        for hidden in names - kept:
            if hidden in sys.modules and _is_hidden(hidden, folder):
                for name in [name for name in sys.modules if name == hidden or name.startswith(f"{hidden}.")]:
                    del sys.modules[name]


def _is_hidden(name: str, folder: str) -> bool:
    """Return whether the folder has this module, and another one of the name is loaded."""
    found = importlib.machinery.PathFinder.find_spec(name, [folder])
    if found is None or found.origin is None:  # no module, or a folder without __init__.py
        return False
    loaded = getattr(sys.modules[name], "__file__", None)
    return loaded is None or os.path.realpath(loaded) != os.path.realpath(found.origin)
