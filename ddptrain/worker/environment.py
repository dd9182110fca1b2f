"""Python environments for the ranks on this host: uv installs each once, in a private cache that keeps the last ones.

An environment is named by the digest of its files, which the driver sends, and of what it needs of this host: Python,
platform and ddptrain. It has what its files name. Everything else, ddptrain first of all, comes from the environment
of the worker.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import (
    CREATE,
    make_private,
    make_temp_folder,
    open_regular,
    publish,
    sha256,
    try_lock,
    wait_for_lock,
    why_not_private,
)
from ddptrain.isolated import Isolated
from ddptrain.version import __version__

LOCK_FILE, REQUIREMENTS = "uv.lock", "requirements.txt"  # one of them is among the files of an environment
_KEPT = 5  # environments: one with torch has some GB, most of them hard links to files of uv's own cache
_LINES = 15  # of uv's output in an error
_STALE = ("needs to be updated", "No solution found")  # uv resolves only what a lock file does not fit
_UNFINISHED = "new-"
_VERSION_OF = "import ddptrain.version as v; print(v.__version__)"


def python_of(digest: str) -> str:
    """Return the Python of an installed environment; "" if it is not installed. It counts as used now."""
    folder = _folder(digest)
    python = folder / "bin" / "python"
    with contextlib.suppress(OSError):
        os.utime(folder)
        return str(python)
    return ""


def hold(digest: str) -> tuple[str, int] | None:
    """Return the Python of an environment, and a descriptor that protects it from being deleted; None: not installed.

    Waits while another process installs it.
    """
    with contextlib.suppress(OSError):  # there is no cache
        descriptor = open_regular(_lock(_folder(digest)), CREATE)
        wait_for_lock(descriptor, shared=True)
        if python := python_of(digest):
            return python, descriptor
        os.close(descriptor)
    return None


def install(digest: str, files: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Install an environment, unless another process does so meanwhile; delete the oldest ones.

    files: their texts by name. environ: the environment of uv.

    Raises UsageError if the lock file is not up to date, or names another version of ddptrain; ClusterError if uv is
    missing or fails.
    """
    folder = _folder(digest)
    try:
        make_private(folder.parent)
        if problem := why_not_private(folder.parent, os.lstat(folder.parent)):
            raise ClusterError(problem)
        lock = open_regular(_lock(folder), CREATE)
        try:
            wait_for_lock(lock)
            if not folder.is_dir():
                _install(folder, files, environ)
        finally:
            os.close(lock)
        _prune(folder)
    except OSError as error:
        text = f"the environment can't be installed below {folder.parent}: {error}; XDG_CACHE_HOME names another place"
        raise ClusterError(text) from error


def _folder(digest: str) -> Path:
    import platformdirs

    of_host = (sys.version, sys.prefix, platform.machine(), *platform.libc_ver(), __version__)
    name = sha256("\n".join((digest, *of_host)).encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("ddptrain") / "environments" / name


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _install(folder: Path, files: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Let uv install into a new folder; give it its name when all is there."""
    new, in_use = make_temp_folder(_UNFINISHED, folder.parent)
    try:
        for name, text in files.items():
            (new / name).write_text(text, encoding="utf-8")
        kept = {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        request = {"folder": str(new), "names": [*files], "import_path": kept.get("PYTHONPATH", "")}
        with Isolated(f"{__name__}:run_uv", request, kept) as process:
            list(process.answers())
        publish(new / "environment", folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(in_use)


def _prune(newest: Path) -> None:
    """Delete the environments that were not used for the longest time, except `newest` and those that are held."""
    found = [path for path in newest.parent.iterdir() if path.is_dir() and not path.name.startswith(_UNFINISHED)]
    for folder in sorted(found, key=lambda path: -path.stat().st_mtime)[_KEPT:]:
        lock = open_regular(_lock(folder), CREATE)
        try:
            if folder != newest and try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


# --- in the process that ends with its parent, and uv with it ---


def run_uv(request: Mapping[str, Any], send: Callable[[object], None]) -> None:
    """Make the environment of the files `names` in `folder`, as its folder "environment". Raises as install()."""
    folder = Path(request["folder"])
    target = folder / "environment"
    os.environ["UV_PROJECT_ENVIRONMENT"] = str(target)
    # This process imports what its parent does. Builds, and the new environment, must not.
    os.environ["PYTHONPATH"] = request["import_path"]
    # The folder gets another name: relocatable. The interpreter is the worker's own: its packages are used, too.
    _uv(folder, "venv", "--relocatable", "--no-project", "--python", sys.executable, str(target))
    python = str(target / "bin" / "python")
    if LOCK_FILE in request["names"]:
        _uv(folder, "sync", "--locked", "--no-dev", "--no-install-workspace", "--python", python)
    else:
        _uv(folder, "pip", "sync", "--python", python, REQUIREMENTS)
    (site,) = target.glob("lib/python*/site-packages")
    own = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # They come at the end of sys.path, with their .pth files.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in own]
    (site / "ddptrain-worker.pth").write_text("".join(lines))
    done = subprocess.run([python, "-P", "-c", _VERSION_OF], capture_output=True, text=True, check=False)
    if done.stdout.strip() != __version__:
        found = done.stdout.strip() or f"a broken one ({done.stderr.strip()[-300:]})"
        raise UsageError(
            f"the environment has ddptrain {found}, the driver {__version__}: require ddptrain=={__version__}, or "
            "leave it out: then the environment uses that of the worker"
        )


def _uv(folder: Path, *arguments: str) -> None:
    """Run uv in a folder. Raises UsageError, ClusterError."""
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        raise ClusterError(
            "code.environment needs uv on each host, and it is not there: install it (pip install uv), or add its "
            f"folder to PATH, which is {os.environ.get('PATH', '')}"
        )
    command = [program, "--no-progress", "--color", "never", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LINES:])
    if "--locked" in arguments and any(text in lines for text in _STALE):
        raise UsageError(f"uv.lock does not fit pyproject.toml any more: run `uv lock` beside it\n{lines}")
    words = " ".join(arguments[: 2 if arguments[0] == "pip" else 1])
    raise ClusterError(f"`uv {words}` failed with exit code {done.returncode}; its last lines:\n{lines}")
