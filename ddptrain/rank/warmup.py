"""The imports that every rank would otherwise pay for: torch, DDP, and what an optimizer's constructor pulls in."""

from __future__ import annotations

import sys
import types


def import_everything() -> None:
    """Import what ranks use, without running an op or touching a device.

    `torch._dynamo` is pulled in by the constructor of any optimizer (a second of CPU), `dask_pytorch_ddp.dispatch`
    brings the process group up, and `safetensors.torch` writes checkpoints. User code is never imported here.
    """
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
        pass
    finally:
        for name in stand_ins:
            del sys.modules[name]
