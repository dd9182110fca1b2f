"""Finds the file of a configuration, and reads its text."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import ConfigError, Problem

MAX_BYTES = 1 << 20
MAX_NEIGHBOURS = 1000  # how many files of a folder are considered for a hint


def shipped_configs() -> dict[str, Path]:
    """Return the shipped examples by name, from the package or from the checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def find_config(source: Path | str) -> Path:
    """Return the path of a file, or of the shipped example of that name. Raises ConfigError with a similar one."""
    path = Path(source)
    if not str(source).strip():
        raise ConfigError([Problem("configuration", "", "no file is named", "as in configs/petnames.yaml")])
    try:
        os.stat(path)
        return path
    except (FileNotFoundError, NotADirectoryError):
        shipped = shipped_configs()
    except (OSError, ValueError):
        # Reading the file gives the exact error.
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    raise ConfigError([Problem(shorten(str(path), 300), "", "there is no such file", _missing_hint(path, shipped))])


def _missing_hint(path: Path, shipped: dict[str, Path]) -> str:
    beside: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError), os.scandir(path.parent) as entries:
        names = (entry.name for entry in itertools.islice(entries, MAX_NEIGHBOURS))
        beside = {Path(name).stem: name for name in names if name.endswith((".yaml", ".yml"))}
    if match := nearest(path.stem, beside):
        return f"did you mean {shorten(str(path.parent / beside[match]), 300)}?"
    if match := nearest(path.stem, shipped):
        return f"did you mean {match}?"
    if beside:
        return f"in this folder: {shorten(', '.join(sorted(beside.values())), 200)}"
    return f"shipped examples are: {', '.join(shipped)}" if shipped else ""


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark. Raises ConfigError if it is no UTF-8 file of 1 MiB."""
    where = shorten(str(path), 300)
    try:
        if path.exists() and not path.is_file():
            what = "is a folder, not a YAML file" if path.is_dir() else "is not a regular file"
            raise ConfigError([Problem(where, "", what, "name a YAML file")])
        with path.open("rb") as file:
            return decode(file.read(MAX_BYTES + 1), where)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError([Problem(where, "", f"can't be read: {reason}")]) from None


def decode(data: bytes, where: str) -> str:
    """Return the text of UTF-8 data. Raises ConfigError if it is not UTF-8, or larger than 1 MiB."""
    if len(data) > MAX_BYTES:
        message = f"is too large for a configuration: at most {MAX_BYTES:,} bytes are read"
        raise ConfigError([Problem(where, "", message, "is it the right file?")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise ConfigError([Problem(f"{where}:{line}", "", message, "save it as UTF-8")]) from None


def python_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, at most MAX_NEIGHBOURS; none if it cannot be read."""
    try:
        return sorted(itertools.islice(folder.glob("*.py"), MAX_NEIGHBOURS))
    except (OSError, ValueError):
        return []
