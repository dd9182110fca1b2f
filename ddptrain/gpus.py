"""The NVIDIA GPUs and CPU cores that this process may use, found without torch and CUDA."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddptrain.errors import ClusterError, one_line

_LIST_S = 20.0  # a broken GPU may block NVML for ever
_WSL_CUDA = Path("usr/lib/wsl/lib/libcuda.so.1")  # only there if Windows has a driver of NVIDIA
_CGROUP = Path("sys/fs/cgroup")


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the visible GPUs as entries of CUDA_VISIBLE_DEVICES: those that the user has set, else all.

    Indices are those of NVML and nvidia-smi: CUDA counts in the same order if CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Raises:
        ClusterError: the machine has GPUs, or CUDA_VISIBLE_DEVICES names some, but NVML can't list them.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    # As in CUDA, the first entry that names no device (-1, NoDevFiles) ends the list.
    words = (word.strip() for word in (chosen or "").split(","))
    names = tuple(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    if chosen is not None and not names:
        return ()
    count, failure = _gpu_count()
    if not count and (sign := f"CUDA_VISIBLE_DEVICES is {chosen}" if names else _sign_of_gpus(root)):
        raise ClusterError(
            f"{sign}, but the GPUs of {os.uname().nodename} can't be listed: {failure or 'NVML finds none'}. Does "
            "nvidia-smi work there? A container needs the driver capability `utility`. To train on the CPU, set "
            "cluster.gpus to 0, or CUDA_VISIBLE_DEVICES to nothing"
        )
    return names if names and count else tuple(str(index) for index in range(count))


def default_slots(gpus: Sequence[str]) -> int:
    """Return the default number of ranks: one per GPU, or one per 2 cores and at least 2."""
    return len(gpus) or max(2, usable_cores() // 2)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: a batch system or a container may limit it."""
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    return max(1, min(present, allowed, *(math.ceil(quota) for quota in _cpu_quotas(root))))


def _gpu_count() -> tuple[int, str]:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # first, because the import of pynvml takes 0.1 s
        import pynvml
    except (OSError, ImportError) as error:
        return 0, one_line(error)
    found: list[tuple[int, str]] = []

    def count() -> None:
        try:
            pynvml.nvmlInit()
            try:
                found.append((int(pynvml.nvmlDeviceGetCount()), ""))
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            found.append((0, f"NVML says: {one_line(error)}"))

    thread = threading.Thread(target=count, name="ddptrain-nvml", daemon=True)
    thread.start()
    thread.join(_LIST_S)
    return found[0] if found else (0, f"NVML does not answer within {_LIST_S:g} s")


def _sign_of_gpus(root: Path) -> str:
    """Return what shows that this machine has a GPU of NVIDIA, or ""."""
    devices = sorted(path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    if devices:
        return f"{devices[0]} exists"
    wsl = (root / "dev/dxg").exists() and (root / _WSL_CUDA).exists()
    return f"{root / _WSL_CUDA} exists" if wsl else ""


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the limits on CPU time, in cores, of this process's control groups and of those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / _CGROUP / ("cpu" if controllers else "")  # version 2 has no list of controllers
        group = Path(path.lstrip("/"))
        for folder in (base / each for each in (group, *group.parents)):  # a container sees its own group as the root
            with suppress(OSError, ValueError):  # no such group or no limit: "max", or -1 in version 1
                if controllers:
                    names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                    quota, period = (int((folder / name).read_text()) for name in names)
                else:
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                if quota > 0:
                    yield quota / period
