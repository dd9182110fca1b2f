"""Other Python environments, made of this one: as on clusters that others have set up."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

UV = str(Path(sys.executable).with_name("uv"))


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
        for points in Path(sysconfig.get_path("purelib")).glob(f"{package}-*.dist-info/entry_points.txt"):
            (info / points.name).write_bytes(points.read_bytes())  # torch loads its own by them
    return python


def make_wheel(folder: Path, name: str, version: str, code: str) -> None:
    """A wheel of one module, in a folder that is an index for uv."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)


def make_source(folder: Path, name: str, version: str, build: str) -> None:
    """A source archive in an index for uv, which runs `build` to make a wheel of it."""
    folder.mkdir(exist_ok=True)
    own = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    project = f'{own}[project]\nname = "{name}"\nversion = "{version}"\n'
    info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    backend = f"def build_wheel(*_, **__):\n    {build}\n"
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for path, text in (("pyproject.toml", project), ("PKG-INFO", info), ("backend.py", backend)):
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def lock_project(folder: Path, index: Path, *dependencies: str) -> None:
    """Write pyproject.toml and uv.lock of a project that has these dependencies, all of them from the index."""
    project = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = {[*dependencies]}\n'
    own = f'[[tool.uv.index]]\nname = "own"\nurl = "{index}"\nformat = "flat"\ndefault = true\n'
    (folder / "pyproject.toml").write_text(project + own)
    subprocess.run([UV, "lock", "--quiet", "--project", str(folder)], check=True)
