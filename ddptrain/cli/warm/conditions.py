"""What must be equal in two processes, so that a fork of one can stand for a program that starts in the other.

Standard library only: a command compares before it imports anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Read by the C library, the interpreter or modules of the driver when they start.
_PREFIXES = ("COVERAGE_", "DASK_", "GLIBC_", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYDANTIC_", "PYTHON", "SSL_", "XDG_")
_NAMES = frozenset({"HOME", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV"})
_FLAGS = ("debug", "optimize", "dont_write_bytecode", "no_user_site", "no_site", "ignore_environment", "bytes_warning")
_MODES = ("dev_mode", "utf8_mode", "isolated")
_RIGHTS = ("Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
_PLACES = ("Cpus_allowed", "Mems_allowed")
_LOGIN = re.compile(r"/(session-c?\d+|vte-spawn-[0-9a-f-]+)\.scope$", re.MULTILINE)  # each login has its own cgroup
_PACKAGE = Path(__file__).parents[2]


def conditions(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what must be equal, as plain data: program, code, environment, rights, limits. Linux only."""
    status, root = process_status(), os.stat("/")
    namespaces = [name for name in sorted(os.listdir("/proc/self/ns")) if "for_children" not in name]
    return {
        "program": [sys.executable, sys.version, *(getattr(sys.flags, name) for name in (*_FLAGS, *_MODES))],
        "options": [*sys.warnoptions, *(f"{name}={value}" for name, value in sys._xoptions.items())],  # noqa: SLF001
        "code": [str(_PACKAGE), *_stamp(_PACKAGE), os.stat(os.path.dirname(os.__file__)).st_mtime_ns, *_site_stamps()],
        "dask": [*_stamp(Path(environ.get("HOME", "/"), ".config", "dask")), *_stamp(Path("/etc/dask"))],
        "environment": {name: environ[name] for name in sorted(environ) if _counts(name)},
        "rights": [status.get(name, "") for name in _RIGHTS],
        "places": [status.get(name, "") for name in _PLACES],
        "limits": _read("limits"),
        "oom": _read("oom_score_adj"),
        "label": _read("attr/current"),
        "cgroup": _LOGIN.sub("", _read("cgroup")),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in namespaces],
        "root": [root.st_dev, root.st_ino],
    }


def process_status() -> dict[str, str]:
    """Return the fields of /proc/self/status."""
    lines = (line.partition(":") for line in _read("status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _counts(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _read(name: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/self/{name}", encoding="utf-8") as file:
        return file.read()
    return ""


def _stamp(folder: Path) -> tuple[int, int]:
    """Return the number of files of a folder tree, byte code left out, and the time of the newest change of one."""
    count, newest, folders = 0, 0, [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders += [] if entry.name == "__pycache__" else [entry.path]
                else:
                    count, newest = count + 1, max(newest, entry.stat().st_mtime_ns)
    return count, newest


def _site_stamps() -> list[int]:
    """Return when the folders with installed packages changed: pip adds and removes folders there."""
    found = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return [os.stat(entry).st_mtime_ns for entry in found if os.path.isdir(entry)]
