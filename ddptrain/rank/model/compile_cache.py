"""The compile cache of a host: code that torch.compile has generated, for other ranks and for later runs.

Each key has a folder below the user's cache folder. Inductor stores its graphs, kernels and shared libraries there, and
those of Triton, and checks itself whether a stored graph is still valid. It executes these files, so a folder that
another user could write to is never used.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs
import torch

from ddptrain import log
from ddptrain.file_ops import (
    CREATE,
    make_private,
    open_regular,
    publish,
    sha256,
    try_lock,
    wait_for_lock,
    why_not_private,
)
from ddptrain.protocol.rank_spec import Code, RankSpec

LIMIT_BYTES = 2_000_000_000
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TORCHS_OWN = "torchinductor_"  # torch sets the variable to its default, <tmp>/torchinductor_<user>, when imported
_REMOVED = ".removed-"
_BUSY = b"compiling"

_log = log.Log("ddptrain.rank.compile_cache")


class CompileCache:
    """The cache of one key. A shared lock prevents its deletion as long as this process runs.

    The ranks of a host compile one after the other: the first rank compiles a graph, other ranks load it. If a process
    was killed while it compiled, files may be incomplete, so the next process deletes the content.
    """

    def __init__(self, key: str, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raise OSError if the folder cannot be created, or if another user could write to it."""
        root = folder or platformdirs.user_cache_path("ddptrain") / "compile"
        make_private(root)
        require_private(root)
        prune(root, limit_bytes)
        self.folder = root / key
        self._use = open_regular(root / f"{key}.use", CREATE)
        wait_for_lock(self._use, shared=True)
        self._compiling = root / f"{key}.compile"
        self.folder.mkdir(exist_ok=True, mode=0o700)
        require_private(self.folder)
        self.is_empty = not any(self.folder.iterdir())
        os.utime(self.folder)  # what was used least recently is deleted first

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Allow only one process of the host in the block; several if the file system has no locks or is full."""
        with ExitStack() as held:
            try:
                descriptor = open_regular(self._compiling, CREATE)
                held.callback(os.close, descriptor)
                wait_for_lock(descriptor)
                if os.fstat(descriptor).st_size:
                    _log.info("a process was killed while it compiled: compile cache emptied", folder=self.folder)
                    self.clear()
                held.callback(os.ftruncate, descriptor, 0)
                os.pwrite(descriptor, _BUSY, 0)
            except OSError as error:
                _log.warning("the compile cache can't be locked", folder=self.folder, error=str(error))
            yield

    def clear(self) -> None:
        """Delete the content. Code that other processes have loaded stays in their memory."""
        self.is_empty = True
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def inductor_backend(spec: RankSpec, device: torch.device, note: Callable[[str], None]) -> Callable[..., Any] | str:
    """Return the backend for torch.compile that stores generated code in the cache.

    Return "inductor" if the user has set TORCHINDUCTOR_CACHE_DIR, or if there is no usable cache folder: the rank then
    compiles in its staging folder, and `note` gets the reason. Otherwise set the variable for this process.
    """
    chosen = spec.env.get(_VARIABLE, "")
    if chosen and not Path(chosen).name.startswith(_TORCHS_OWN):
        return "inductor"
    try:
        cache = CompileCache(cache_key(spec.code, device))
    except OSError as error:
        note(f"compiled code is not kept for later runs: {error}")
        os.environ[_VARIABLE] = str(Path(spec.host.staging) / "compile")
        return "inductor"
    os.environ[_VARIABLE] = str(cache.folder)
    _log.info("compile cache", folder=cache.folder)

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def compile_one(*args: Any, **kwargs: Any) -> Any:
            """Compile or load a forward or backward graph, without collective operations."""
            with cache.exclusive():
                try:
                    return compile_fx_inner(*args, **kwargs)
                except Exception as error:  # perhaps a damaged file; if not, the second attempt raises it again
                    if cache.is_empty:
                        raise
                    _log.warning("compiling failed; again without the compile cache", error=repr(error))
                    cache.clear()
                    _forget_loaded_code()
                    return compile_fx_inner(*args, **kwargs)

        return compile_fx(graph, inputs, inner_compile=compile_one, **options)

    return backend


def cache_key(code: Code, device: torch.device) -> str:
    """Return the folder's name, a hash of the project's path, the workload, and the versions of Python, torch and
    device.

    The project's content is not part of it: inductor compares graphs, so only an edit of the model invalidates code.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    parts = ("" if code.content_hash else code.workdir, code.workload, code.script, code.module)
    versions = (sys.version, str(torch.__version__), str(torch.version.cuda), name)
    return sha256("\0".join((*parts, *versions)).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return the name and the instruction sets of the processor, for which kernels are compiled."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def require_private(folder: Path) -> None:
    """Raise OSError if another user could write to the folder, or replace it or one of the folders above it."""
    if problem := why_not_private(folder, folder.lstat()):
        raise PermissionError(problem)
    for above in folder.resolve().parents:
        status = above.stat()
        # A group with the id of the user contains only the user; systems with such groups often have the umask 002.
        others = 0o002 if status.st_gid == os.geteuid() else 0o022
        is_open = bool(status.st_mode & others) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or is_open:
            raise PermissionError(f"{above}, above {folder}, can be changed by other users: set XDG_CACHE_HOME")


def prune(root: Path, limit_bytes: int) -> None:
    """Delete the least recently used folders until the cache is within its limit; skip folders in use."""
    keys = sorted(
        (path for path in root.iterdir() if path.is_dir() and not path.is_symlink()), key=lambda p: -p.stat().st_mtime
    )
    total = 0
    for folder in keys:
        if folder.name.startswith(_REMOVED):  # of a process that was killed
            shutil.rmtree(folder, ignore_errors=True)
            continue
        total += sum(_size(path) for path in folder.rglob("*"))
        if total > limit_bytes and _delete(folder):
            _log.info("compile cache: deleted what was used least recently", folder=folder)


def _size(path: Path) -> int:
    with suppress(OSError):  # another process deletes it
        return path.lstat().st_size
    return 0


def _delete(folder: Path) -> bool:
    descriptor = open_regular(folder.with_name(f"{folder.name}.use"), CREATE)
    try:
        if not try_lock(descriptor):
            return False
        with suppress(OSError):  # another process was faster
            removed = folder.with_name(f"{_REMOVED}{secrets.token_hex(8)}")
            publish(folder, removed)
            shutil.rmtree(removed, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)


def _forget_loaded_code() -> None:
    """Make inductor forget the modules that it has loaded from the cache."""
    from torch._inductor.utils import clear_caches

    clear_caches()
