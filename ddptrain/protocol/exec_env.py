"""Environment variables that only take effect when a program starts, and the module search path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# Read by the C library or the interpreter when a program starts.
_PREFIXES = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OPENBLAS_", "MKL_", "KMP_", "GOMP_")
_IGNORED = frozenset({"PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS"})
_PATH = "PYTHONPATH"


def exec_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that have no effect after a fork."""
    kept = without_working_directory(environ)
    return {name: value for name, value in kept.items() if name.startswith(_PREFIXES) and name not in _IGNORED}


def names_working_directory(environ: Mapping[str, str]) -> bool:
    """Return whether PYTHONPATH has an empty entry, as in `:/lib`, which means the working directory."""
    return "" in environ.get(_PATH, "x").split(os.pathsep) and environ[_PATH] != ""


def without_working_directory(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without empty entries in PYTHONPATH, which mean the working directory."""
    kept = dict(environ)
    if names_working_directory(environ):
        named = os.pathsep.join(filter(None, kept.pop(_PATH).split(os.pathsep)))
        kept |= {_PATH: named} if named else {}
    return kept


def leave_working_directory() -> None:
    """Remove the working directory from this process's import path, unless PYTHONPATH names it.

    `python -m` and empty entries in PYTHONPATH insert it before the standard library. An entry after the standard
    library belongs to an installed package, such as an editable one, and stays.
    """
    cwd = os.getcwd()
    named = {os.path.abspath(entry) for entry in os.environ.get(_PATH, "").split(os.pathsep) if entry}
    library = os.path.dirname(os.__file__)
    before = sys.path.index(library) if library in sys.path else len(sys.path)
    implied = {"", cwd} - named
    sys.path[:] = [*(entry for entry in sys.path[:before] if entry not in implied), *sys.path[before:]]
