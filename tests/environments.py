"""Other Python environments, made of this one: as on clusters that others have set up."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def make_environment(folder: Path, *, without: tuple[str, ...] = (), versions: dict[str, str] | None = None) -> Path:
    """An environment with links to all packages of this one but some, and other `versions` of some by name.

    Returns its Python. No package is copied or fetched: it takes a tenth of a second.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    changed = tuple(name.replace("-", "_") for name in (*without, *(versions or {})))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        told = package.name.replace("-", "_")
        is_info = told.endswith(".dist_info") or told.endswith(".pth")
        if not any(told.removeprefix("_editable_impl_").startswith(name) and is_info for name in changed):
            continue
    return folder
