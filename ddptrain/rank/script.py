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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddptrain.protocol.rank_spec import RankSpec


def run(spec: RankSpec, before: Callable[[], None] = lambda: None) -> None:
    """Run the rank's program. `before` is called just before, when the program's modules can already be imported.

    Raises any exception of the program, including SystemExit.
    """
    # Python has set this when the rank server started. Spawned child processes use it to find __main__.
    multiprocessing.process.ORIGINAL_DIR = spec.code.workdir  # type: ignore[attr-defined]
    main = _new_main()
    if spec.code.script:
        path = find_script(spec)
        sys.path.insert(0, str(path.resolve().parent))
        sys.argv = [spec.code.script, *_arguments(spec)]
        main.__file__ = str(path)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(path))
        code = _compiled(path)
    else:
        sys.argv = ["-m", *_arguments(spec)]
        module = _find_module(spec.code.module)
        sys.argv[0] = str(module.origin)
        main.__file__, main.__loader__, main.__spec__ = module.origin, module.loader, module
        main.__package__ = module.parent
        main.__dict__["__cached__"] = module.cached
        code = _code_of(module)
    before()
    exec(code, main.__dict__)  # noqa: S102  # the user's own program


def find_script(spec: RankSpec) -> Path:
    """Find the script in the folders of the user's code; return its path. Raises FileNotFoundError."""
    folders = dict.fromkeys((*spec.code.sys_path, spec.code.workdir))
    for folder in folders:
        path = Path(folder) / spec.code.script
        if path.is_file():
            return Path(os.path.abspath(path))
    searched = f" (looked for in {', '.join(folders)})" if not os.path.isabs(spec.code.script) else ""
    raise FileNotFoundError(f"there is no script {spec.code.script} on host {socket.gethostname()}{searched}")


def _arguments(spec: RankSpec) -> list[str]:
    return [f"--local-rank={spec.placement.local_rank}"] * spec.code.local_rank_arg + list(spec.code.args)


def _new_main() -> types.ModuleType:
    """Create the __main__ module, in which pickles and spawned child processes look for the program's definitions."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__cached__": None, "__annotations__": {}})
    _kept.append(sys.modules["__main__"])  # keeps the old module alive, whose functions are still executing
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # spawned children use the second name in pickles
    return main


_kept: list[types.ModuleType] = []


def _compiled(path: Path) -> types.CodeType:
    with io.open_code(str(path)) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of the module, or of a package's __main__ module. Raises ModuleNotFoundError."""
    module = importlib.util.find_spec(name)
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
