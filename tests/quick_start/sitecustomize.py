"""Spares the processes of tests the import of torch._dynamo: 2 s of CPU for each rank server, of its 5 s.

Optimizers, DistributedDataParallel and init_process_group call four of its functions, for the sake of torch.compile,
which few tests use. The stand-in has these four. Anything else imports torch._dynamo itself. pytest puts this folder on
PYTHONPATH; tests marked `real_start` run without it.
"""

import importlib
import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_NAME = "torch._dynamo"


class _StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, as far as the import system asks

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.graph_break = lambda *_: None
        self.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
        self.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")

    @staticmethod
    def disable(function: Any, recursive: bool = True, **_: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_import_real(), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name == _NAME:
            return ModuleSpec(name, self)
        if name.startswith(_NAME + "."):  # the stand-in has been imported, and is not enough
            _import_real()
            return importlib.util.find_spec(name)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def _import_real() -> types.ModuleType:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        sys.modules.pop(_NAME, None)
        vars(sys.modules["torch"]).pop("_dynamo", None)
    return importlib.import_module(_NAME)
