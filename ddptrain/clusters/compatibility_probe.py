"""The probe that runs in the processes of a Dask cluster. Its source text is sent, since they may lack ddptrain.

It uses only the standard library of Python 3.9 and newer. It imports neither torch nor the workload: that would cost a
Dask worker 640 MB of memory.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import sys

# For these the imported version counts, not one that was installed after the process started.
_RUNS_HERE = ("ddptrain", "distributed")


def look(packages: tuple[str, ...], module: str, folders: tuple[str, ...]) -> str:
    """Return versions by name as JSON (null: missing), and "workload": whether `module` is here or in `folders`."""
    # What was missing a moment ago may have been installed. importlib.metadata looks at the folders' times by itself.
    for finder in sys.path_importer_cache.values():
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()
    versions = {name: _version(name) for name in packages}
    workload = "found" if _is_found(module, folders) else None
    system = sys.platform + " " + platform.machine()
    return json.dumps({"Python": platform.python_version(), **versions, "workload": workload, "platform": system})


def _version(name: str) -> str | None:
    loaded = sys.modules.get(name) if name in _RUNS_HERE else None
    if loaded is None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in _RUNS_HERE or importlib.util.find_spec(name) is None:
                return None
        loaded = importlib.import_module(name)  # it is on the path, but not installed
    return str(loaded.__version__)


def _is_found(module: str, folders: tuple[str, ...]) -> bool:
    """Whether the top-level module can be imported; a folder without __init__.py counts if the name has more parts."""
    first, _, rest = module.partition(".")
    specs = (importlib.machinery.PathFinder.find_spec(first, list(folders)), _installed(first))
    return any(spec is not None and (spec.loader is not None or rest != "") for spec in specs)


def _installed(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # it is loaded and has no spec
        return None
