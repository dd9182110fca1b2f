"""The NVIDIA GPUs and CPU cores of this machine, found without torch and CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the visible GPUs as entries of CUDA_VISIBLE_DEVICES: those that the user has set, else all."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = _gpus_of_nvidia_smi() if chosen is None or chosen.strip() else ()
    if chosen is None:
        return present
    names = tuple(name.strip() for name in chosen.split(",") if name.strip())
    return tuple(name for name in names if name != "-1") if present else ()


def default_slots(gpus: Sequence[str]) -> int:
    """Return the default number of ranks: one per GPU, or one per 2 cores and at least 2."""
    return len(gpus) or max(2, usable_cores() // 2)


def usable_cores() -> int:
    """Return the number of cores that this process may use (a batch system may limit it)."""
    present = os.cpu_count() or 1
    return min(present, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else present


def _gpus_of_nvidia_smi() -> tuple[str, ...]:
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
