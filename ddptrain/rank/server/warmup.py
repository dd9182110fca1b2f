"""Imports everything that ranks need, so that a forked rank starts without importing torch."""

from __future__ import annotations

import importlib
import sys
import types

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
    "ddptrain.rank.data.dataloader_workers",
    "ddptrain.rank.rank_process",
)


def import_everything() -> None:
    """Import all modules that ranks use, without running a torch operation or touching a device."""
    for name in _MODULES:
        importlib.import_module(name)
    _import_dispatch()


def _import_dispatch() -> None:
    """Import dask_pytorch_ddp.dispatch without Dask, which it needs only for one annotation.

    Importing Dask takes 0.3 s. The placeholder modules are removed afterwards: user code that imports Dask gets Dask.
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
