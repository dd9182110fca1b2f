"""Files that ranks hand over, each whole, verified, and below its folder: artifacts/, or tracking/."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ddptrain.protocol.events import FileSaved
from ddptrain.results.errors import FileDamaged, UnsafePath, naming
from ddptrain.results.files import sync_folder
from ddptrain.results.layout import INCOMING, safe_relative
from ddptrain.results.staging import Parcel, bring_home


def adopt(area: Path, event: FileSaved, source: Path) -> Path:
    """Bring a staged file home to `area`/`event.path`, replacing one of that name; return where it is.

    Raises:
        UnsafePath: the path leaves the folder, directly or through a link, or collides with a folder.
        FileDamaged: the staged file is not what its event says.
        ResultsError: it can't be written.
    """
    relative = safe_relative(event.path)
    folder = _folder(area, relative.parent.parts)
    final = folder / relative.name
    if final.is_dir() and not final.is_symlink():
        raise UnsafePath(f'cannot save a file as "{event.path}": {area.name}/{relative} is a folder')
    incoming = folder / f"{INCOMING}{secrets.token_hex(8)}"
    try:
        bring_home([Parcel(source, incoming, event.size_bytes, event.sha256)], FileDamaged)
        with naming(final):
            os.replace(incoming, final)
            sync_folder(folder)
    except BaseException:
        incoming.unlink(missing_ok=True)
        raise
    source.unlink(missing_ok=True)
    return final


def _folder(area: Path, parts: tuple[str, ...]) -> Path:
    """The folder below `area`, made if need be; every step of the way is a real folder, not a link."""
    folder = area
    for part in ("", *parts):
        folder = folder / part
        with naming(folder):
            if not os.path.lexists(folder):
                folder.mkdir()
            kind = folder.lstat().st_mode
        if not stat.S_ISDIR(kind):
            what = "a symbolic link" if stat.S_ISLNK(kind) else "a file"
            raise UnsafePath(f"cannot save a file below {folder}: that is {what}, not a folder; choose another path")
    return folder
