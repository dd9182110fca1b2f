"""Runs a script or a module in this process as Python does: as __main__, with its own sys.argv and sys.path."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import multiprocessing.process
import os
import runpy
import socket
import sys
import types
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import bare_process


def run(spec: RankSpec, before: Callable[[], None] = lambda: None) -> None:
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
            is_compiled = path.suffix == ".pyc"
            loader = importlib.machinery.SourcelessFileLoader if is_compiled else importlib.machinery.SourceFileLoader
            main.__file__, main.__loader__ = str(path), loader("__main__", str(path))
            code = main.__loader__.get_code("__main__") if is_compiled else _compiled(path)
    forget_hidden_modules(sys.path[:1] if spec.code.script else [spec.code.workdir])
    before()
    if code is not None:
        exec(code, main.__dict__)  # noqa: S102  # the user's own program
    else:  # as Python does for -m, for a folder and for a zip file
        runpy._run_module_as_main(module, alter_argv=module == spec.code.module)  # type: ignore[attr-defined]  # noqa: SLF001


_kept: list[types.ModuleType] = []


def _compiled(path: Path) -> types.CodeType:
    with io.open_code(str(path)) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True)


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
