"""Other Python environments, made of this one: as on clusters that others have set up."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path


def make_environment(folder: Path, without: str = "", versions: Mapping[str, str] | None = None) -> Path:
    """An environment with links to all packages of this one but one, where some say that they have other `versions`.

    Returns its Python. Nothing is copied or fetched, so it takes some milliseconds.
    """
    told = {name.replace("-", "_"): version for name, version in (versions or {}).items()}
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        package, dash, _ = path.name.removeprefix("_editable_impl_").removesuffix(".pth").partition("-")
        if package != without and not (dash and package in told):
            (site / path.name).symlink_to(path)
    for package, version in told.items():
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return python
