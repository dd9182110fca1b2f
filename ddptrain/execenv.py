"""Environment variables that only a program's start can apply: a process that is forked can't take them over."""

from __future__ import annotations

from collections.abc import Mapping

# Read by the C library or the interpreter when a program starts.
_PREFIXES = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OPENBLAS_", "MKL_", "KMP_", "GOMP_")
_IGNORED = frozenset({"PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS"})


def exec_only(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that a fork can't apply any more."""
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES) and name not in _IGNORED}
