"""How a process starts: variables that only a new process reads, its command line, and its module search path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

JOB = (
    "DDPTRAIN_JOB"  # of a driver that --submit has sent, as "slurm 12 RUN_ID": the backend, the id of its job, the run
)
_PREFIXES = (
    *("LD_", "MALLOC_", "GLIBC_", "LANG", "LC_", "PYTHON"),  # read by the C library and the interpreter at the start
    # Read by the libraries of a rank when they are imported or loaded.
    *("OPENBLAS_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "KMP_", "GOMP_", "OMP_", "NPY_", "NUMPY_"),
    *("TORCH", "PYTORCH_", "AOT", "TRITON_", "KINETO_", "TQDM_"),
)
_LATE_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_")  # read when a script asks for them or creates a process group
_OF_THE_HOST = frozenset({"TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"})  # folders, read when used
_LATE = _OF_THE_HOST | {"PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}  # set again in each rank
_PATH = "PYTHONPATH"


def exec_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that have no effect in a fork of a process that has imported torch."""
    kept = without_working_directory(environ)
    early = {name: value for name, value in kept.items() if name.startswith(_PREFIXES) and name not in _LATE}
    return {name: value for name, value in early.items() if not name.startswith(_LATE_PREFIXES)}


def variables_of_shell(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's shell that ranks of a cluster that is up get: those of torch and OpenMP."""
    names = [name for name in environ if name.startswith(("TORCH", "PYTORCH_", "OMP_")) and name not in _OF_THE_HOST]
    return {name: environ[name] for name in names if not name.startswith("TORCHELASTIC_")}


def python_command(module: str, python: str = sys.executable) -> list[str]:
    """Return the command that calls the module's main(), with the streams and flags of a script under torchrun.

    `python -P -m` would do as well, but scripts would see the flag, and the processes that they start inherit it.
    """
    # The empty entry of the path is the working directory.
    start = "import sys; sys.path[:] = filter(None, sys.path); import ddptrain.rank.bare_process"
    code = f"{start}; from {module} import main; main()"
    return [python, "-u", "-c", code]


def names_working_directory(environ: Mapping[str, str]) -> bool:
    """Return whether PYTHONPATH has an empty entry, as in `:/lib`, which means the working directory."""
    return "" in environ.get(_PATH, "x").split(os.pathsep) and environ[_PATH] != ""


def without_working_directory(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without empty entries in PYTHONPATH, which mean the working directory."""
    kept = dict(environ)
    if names_working_directory(environ):
        named = os.pathsep.join(filter(None, kept.pop(_PATH).split(os.pathsep)))
        kept |= {_PATH: named} if named else {}
    return kept


def leave_working_directory() -> None:
    """Remove the working directory from this process's import path, unless PYTHONPATH names it.

    `python -m` and empty entries in PYTHONPATH insert it before the standard library. An entry after the standard
    library belongs to an installed package, such as an editable one, and stays.
    """
    cwd = os.getcwd()
    named = {os.path.abspath(entry) for entry in os.environ.get(_PATH, "").split(os.pathsep) if entry}
    library = os.path.dirname(os.__file__)
    before = sys.path.index(library) if library in sys.path else len(sys.path)
    implied = {"", cwd} - named
    sys.path[:] = [*(entry for entry in sys.path[:before] if entry not in implied), *sys.path[before:]]
