"""Where torch.compile keeps generated code for later runs: inductor's own cache, in a private folder of the user.

Inductor executes these files, so a folder that another user could write to is never used.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import platformdirs

from ddptrain.file_ops import make_private, why_not_private
from ddptrain.protocol.rank_spec import RankSpec

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TORCHS_OWN = "torchinductor_"  # torch sets the variable to its default, <tmp>/torchinductor_<user>, when imported
_KEPT_S = 30 * 86_400.0


def use_compile_cache(spec: RankSpec, note: Callable[[str], None]) -> None:
    """Have inductor keep generated code below the user's cache folder, unless the user has named a folder.

    Without a private cache folder the rank compiles in its staging folder, and `note` gets the reason.
    """
    chosen = spec.env.get(_VARIABLE, "")
    if chosen and not Path(chosen).name.startswith(_TORCHS_OWN):
        return
    root = platformdirs.user_cache_path("ddptrain") / "compile"
    try:
        make_private(root)
        require_private(root)
    except OSError as error:
        note(f"compiled code is not kept for later runs: {error}")
        root = Path(spec.host.staging) / "compile"
    else:
        if spec.placement.local_rank == 0:
            _delete_unused(root)
    os.environ[_VARIABLE] = str(root)


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


def _delete_unused(root: Path) -> None:
    """Delete the folders that nothing was added to for 30 days. Inductor compiles again what it does not find."""
    for folder in root.iterdir():
        with suppress(OSError):  # another process deletes it
            if time.time() - folder.stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
