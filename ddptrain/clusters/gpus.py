"""Which NVIDIA GPUs this machine offers, asked without torch and without touching CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Entries for CUDA_VISIBLE_DEVICES, one a GPU: those of the user's own setting, else all of nvidia-smi's."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = _listed() if chosen is None or chosen.strip() else ()
    if chosen is None:
        return present
    names = tuple(name.strip() for name in chosen.split(",") if name.strip())
    return tuple(name for name in names if name != "-1") if present else ()


def _listed() -> tuple[str, ...]:
    command = shutil.which("nvidia-smi")
    if command is None or not os.path.exists("/dev/nvidiactl"):
        return ()
    try:
        answer = subprocess.run(
            [command, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip().isdigit())
