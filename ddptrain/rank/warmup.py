"""Imports everything that ranks need, so that a forked rank starts without importing torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import weakref

# torch._dynamo: the constructor of any optimizer imports it, which takes a second. User code is never imported here.
_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data.distributed",
    "safetensors.torch",
    "ddptrain.rank.context",
    "ddptrain.rank.loader",
    "ddptrain.rank.lifecycle",
    "ddptrain.rank.steps",
)


def import_everything() -> None:
    """Import all modules that ranks use, without running a torch operation or touching a device."""
    for name in _MODULES:
        importlib.import_module(name)
    _import_dispatch()
    _import_pydantic()
    _find_backends()
    _keep_operators()


def _import_pydantic() -> None:
    """Run the check of a workload's params once: its first call imports and searches modules, 0.2 s of CPU time."""
    from ddptrain.rank.entrypoint import bind

    def workload(ctx: object, name: str) -> None:
        """Stand for a workload with a parameter."""

    bind(workload, {"name": ""})


def _find_backends() -> None:
    """Make torch search the installed packages for gloo and NCCL, which would take 0.1 s of CPU time in each rank."""
    from torch.distributed.distributed_c10d import BackendConfig

    with contextlib.suppress(Exception):  # an error of another package: a rank that creates a process group reports it
        BackendConfig("cpu:gloo,cuda:nccl")


def _keep_operators() -> None:
    """Prevent that each rank unregisters torch's operators at its exit, which takes 0.05 s of CPU time."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public list
        registered = finalizer.peek()
        if registered is not None and getattr(registered[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _import_dispatch() -> None:
    """Import dask_pytorch_ddp.dispatch without Dask, which it needs only for one annotation.

    Importing Dask takes 0.3 s. The placeholder modules are removed afterwards, so that user code can import Dask.
    """
    placeholders = {name: types.ModuleType(name) for name in ("dask", "dask.distributed") if name not in sys.modules}
    for module in placeholders.values():
        module.__dict__["Client"] = object
    sys.modules.update(placeholders)
    try:
        importlib.import_module("dask_pytorch_ddp.dispatch")
    finally:
        for name in placeholders:
            del sys.modules[name]
