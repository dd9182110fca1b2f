"""Installs peers that ddptrain's own environment lacks, each into an environment of its own, which is kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.measure import NotHere
from tests.bench.stage import REPOSITORY

_FOLDER = REPOSITORY / ".bench-peers"
_TIMEOUT_S = 1200.0


def python_with(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with these packages; the first call installs them.

    Raises NotHere if they can't be installed, with the reason.
    """
    folder, wanted = _FOLDER / name, "\n".join(requirements)
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file() and complete.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    _run(name, [uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    _run(name, [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *requirements])
    complete.write_text(wanted)
    return python


def _run(name: str, command: Sequence[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHere(f"{name} cannot be installed: {error}") from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise NotHere(f"{name} cannot be installed: {last.strip()}")
