"""Runs a script or a module in this process as Python does: as __main__, with its own sys.argv and sys.path."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import multiprocessing.process
import os
import socket
import sys
import types
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import bare_process


def run(spec: RankSpec, before: Callable[[], None] = lambda: None) -> None:
    """Run the rank's program. `before` is called just before, when the program's modules can already be imported.

    Raises any exception of the program, including SystemExit.
    """
    # Python has set this when the rank server started. Spawned child processes use it to find __main__.
    multiprocessing.process.ORIGINAL_DIR = spec.code.workdir  # type: ignore[attr-defined]
    main = _new_main()
    code: types.CodeType | None
    if spec.code.script:
        path = find_script(spec)
        sys.argv = [spec.code.script, *_arguments(spec)]
        started = sys.argv
        if path.is_dir() or zipfile.is_zipfile(path):
            sys.path.insert(0, str(path))
            code = _enter_module(main, _find_main(path))
        else:
            sys.path.insert(0, str(path.resolve().parent))
            main.__file__ = str(path)
            if path.suffix == ".pyc":
                main.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", str(path))
                code = main.__loader__.get_code("__main__")
            else:
                main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(path))
                code = _compiled(path)
    else:
        sys.argv = ["-m", *_arguments(spec)]
        started = ["-m", spec.code.module, *sys.argv[1:]]
        module = _find_module(spec.code.module)
        sys.argv[0] = str(module.origin)
        code = _enter_module(main, module)
    sys.orig_argv = [sys.executable, "-u", *started]  # as under torchrun; a program may start itself again
    forget_hidden_modules(sys.path[:1] if spec.code.script else [spec.code.workdir])
    before()
    assert code is not None  # get_code() of a file raises ImportError
    exec(code, main.__dict__)  # noqa: S102  # the user's own program


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


def _arguments(spec: RankSpec) -> list[str]:
    return list(spec.code.args)


def _new_main() -> types.ModuleType:
    """Create the __main__ module, in which pickles and spawned child processes look for the program's definitions."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__cached__": None})
    if sys.version_info < (3, 14):  # from then on they are evaluated when the program asks for them
        main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])  # keeps the old module alive, whose functions are still executing
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # spawned children use the second name in pickles
    return main


_kept: list[types.ModuleType] = []


def _compiled(path: Path) -> types.CodeType:
    with io.open_code(str(path)) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True)


def _find_main(path: Path) -> importlib.machinery.ModuleSpec:
    """Return the spec of the module __main__ in a folder or zip file. Raises ImportError."""
    module = importlib.machinery.PathFinder.find_spec("__main__", [str(path)])
    if module is None or module.loader is None:
        raise ImportError(f"there is no module __main__ in {path}", name="__main__")
    return module


def _enter_module(main: types.ModuleType, module: importlib.machinery.ModuleSpec) -> types.CodeType:
    """Give __main__ the attributes of a module. Return the module's code."""
    main.__file__, main.__loader__, main.__spec__ = module.origin, module.loader, module
    main.__package__ = module.parent
    main.__dict__["__cached__"] = module.cached
    return _code_of(module)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of the module, or of a package's __main__ module. Raises ModuleNotFoundError."""
    try:
        module = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not name.endswith(".py"):
            raise
        text = f"{error}. Try using {name[:-3]!r} instead of {name!r} as the module name"
        raise ModuleNotFoundError(text, name=name) from None
    if module is not None and module.submodule_search_locations is not None:
        name = f"{name}.__main__"
        module = importlib.util.find_spec(name)
    if module is None or module.loader is None:
        raise ModuleNotFoundError(f"there is no module {name!r} to run", name=name)
    return module


def _code_of(module: importlib.machinery.ModuleSpec) -> types.CodeType:
    loader: Any = module.loader
    code = loader.get_code(module.name)
    if code is None:
        raise ImportError(f"there is no Python code for the module {module.name!r}", name=module.name)
    return code  # type: ignore[no-any-return]
