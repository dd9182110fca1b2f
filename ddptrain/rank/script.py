"""Runs a script or a module in this process as python itself would: it is __main__, and nothing of ours is in sight."""

from __future__ import annotations

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
    """Run the rank's program to its end, `before` first, when its modules can be imported.

    Whatever it raises comes out, SystemExit included.
    """
    _be_fresh(spec)
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
        found = _find_module(spec.code.module)
        sys.argv[0] = str(found.origin)
        main.__file__, main.__loader__, main.__spec__ = found.origin, found.loader, found
        main.__package__ = found.parent
        main.__dict__["__cached__"] = found.cached
        code = _code_of(found)
    before()
    exec(code, main.__dict__)  # noqa: S102  # this is what it is for


def find_script(spec: RankSpec) -> Path:
    """The file: where it was typed to be, as seen from where the user's code lies. Raises FileNotFoundError."""
    folders = dict.fromkeys((*spec.code.sys_path, spec.code.workdir))
    for folder in folders:
        path = Path(folder) / spec.code.script
        if path.is_file():
            return Path(os.path.abspath(path))
    looked = f" (looked for in {', '.join(folders)})" if not os.path.isabs(spec.code.script) else ""
    raise FileNotFoundError(f"there is no script {spec.code.script} on host {socket.gethostname()}{looked}")


def _arguments(spec: RankSpec) -> list[str]:
    return [f"--local-rank={spec.placement.local_rank}"] * spec.code.local_rank_arg + list(spec.code.args)


def _be_fresh(spec: RankSpec) -> None:
    """What was noted when the rank server started is as it would be in a program that starts now."""
    multiprocessing.process.ORIGINAL_DIR = spec.code.workdir  # type: ignore[attr-defined]  # children use it to find __main__


def _new_main() -> types.ModuleType:
    """A __main__ as a program finds it: pickles and spawned children look there for what the program defines."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, "__cached__": None, "__annotations__": {}})
    _kept.append(sys.modules["__main__"])  # its functions still run
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the latter is its name in what a child sends back
    return main


_kept: list[types.ModuleType] = []


def _compiled(path: Path) -> types.CodeType:
    with io.open_code(str(path)) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    """The module's spec; of a package, that of its __main__. Raises ModuleNotFoundError."""
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        name = f"{name}.__main__"
        found = importlib.util.find_spec(name)
    if found is None or found.loader is None:
        raise ModuleNotFoundError(f"no module {name!r} that could be run", name=name)
    return found


def _code_of(found: importlib.machinery.ModuleSpec) -> types.CodeType:
    loader: Any = found.loader
    code = loader.get_code(found.name)
    if code is None:
        raise ImportError(f"there is no Python code for the module {found.name!r}", name=found.name)
    return code  # type: ignore[no-any-return]
