"""The imports that every rank would otherwise pay for: torch, DDP, and what an optimizer's constructor pulls in."""

from __future__ import annotations

import importlib
import sys
import types

# The constructor of any optimizer pulls torch._dynamo in: a second of CPU. User code is never imported here.
_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data.distributed",
    "safetensors.torch",
    "ddptrain.rank.context",
    "ddptrain.rank.data.workers",
    "ddptrain.rank.process",
)


def import_everything() -> None:
    """Import what ranks use, without running an op or touching a device."""
    for name in _MODULES:
        importlib.import_module(name)
    _import_dispatch()


def _import_dispatch() -> None:
    """Import dask_pytorch_ddp's dispatch without Dask, of which it names one class in an annotation.

    Dask would cost every start 0.3 s. The stand-ins are gone when this returns: user code that imports Dask gets Dask.
    """
    stand_ins = {name: types.ModuleType(name) for name in ("dask", "dask.distributed") if name not in sys.modules}
    for module in stand_ins.values():
        module.__dict__["Client"] = object
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("dask_pytorch_ddp.dispatch")
    finally:
        for name in stand_ins:
            del sys.modules[name]
