"""What a warm rank server has imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.rank.server import warmup

PROGRAM = """
import importlib.metadata, json, sys
from ddptrain.rank.server import process_control, warmup
warmup.import_everything()
threads = process_control.thread_count()
wanted = ["torch", "torch._dynamo", "torch.nn.parallel", "safetensors.torch", "dask_pytorch_ddp.dispatch"]
imported = [name in sys.modules for name in wanted]
known, searches = set(sys.modules), []
importlib.metadata.entry_points = lambda **group: searches.append(group) or []
from ddptrain.rank.entrypoint import bind
def workload(ctx, folder: str, steps: int = 1): ...
bind(workload, {"folder": "x"})
from ddptrain.rank.steps import ddp_times, waiting_time
from torch.distributed.distributed_c10d import BackendConfig
BackendConfig("gloo")
import weakref
finalizers = weakref.finalize._registry.values()
left = [str(each.func) for each in finalizers if each.atexit and "_del_library" in str(each.func)]
new = sorted(set(sys.modules) - known)
import dask
print(json.dumps({
    "server": {
        "imported": imported,
        "dask_is_real": hasattr(dask, "compute"),
        "cuda": sys.modules["torch"].cuda.is_initialized(),
        "threads": threads,
    },
    "rank": {"new": new, "searches": searches, "at_exit": left},
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one process has found, since each takes 2.5 s of CPU time: after the imports of a server, and as a rank."""
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=110,
        env={**env, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_warm_server_has_torch_and_dynamo_but_no_thread_no_cuda_and_no_false_dask(found: dict[str, Any]) -> None:
    assert found["server"] == {"imported": [True] * 5, "dask_is_real": True, "cuda": False, "threads": 1}


def test_forked_rank_imports_and_searches_nothing_before_its_workload_and_ends_without_torchs_clean_up(
    found: dict[str, Any],
) -> None:
    assert found["rank"] == {"new": [], "searches": [], "at_exit": []}


def test_everything_is_imported_before_torch_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(importlib, "import_module", done.append)
    monkeypatch.setattr(warmup, "_MODULES", ("torch", "torch.optim"))
    for name in ("_import_dispatch", "_import_pydantic", "_find_backends", "_keep_operators"):
        monkeypatch.setattr(warmup, name, lambda name=name: done.append(name))
    warmup.import_everything()
    assert done == ["torch", "torch.optim", "_import_dispatch", "_import_pydantic", "_find_backends", "_keep_operators"]


def test_only_operators_of_torch_are_kept_at_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def finalizer(module: str | None) -> Any:
        function = SimpleNamespace(**({"__module__": module} if module else {}))
        return SimpleNamespace(peek=lambda: (None, function, (), {}), atexit=True)

    operators, others = finalizer("torch.library"), finalizer("tempfile")
    nameless, dead = finalizer(None), SimpleNamespace(peek=lambda: None, atexit=True)
    found: list[Any] = [operators, others, nameless, dead]
    monkeypatch.setattr(weakref, "finalize", SimpleNamespace(_registry=found))
    warmup._keep_operators()
    assert [each.atexit for each in found] == [False, True, True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_dispatch_is_imported_beside_placeholders_for_what_is_not_imported_yet(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    seen: list[Any] = []

    def import_module(name: str) -> None:
        modules = [sys.modules["dask"], sys.modules["dask.distributed"]]
        seen.append((name, modules[0] is dask, getattr(modules[1], "Client", None)))
        if fails:
            raise ImportError("no dispatch")

    dask: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "dask", dask)
    monkeypatch.delitem(sys.modules, "dask.distributed", raising=False)
    monkeypatch.setattr(importlib, "import_module", import_module)
    try:
        warmup._import_dispatch()
    except ImportError:
        assert fails
    assert seen == [("dask_pytorch_ddp.dispatch", True, object)]
    assert "dask.distributed" not in sys.modules and sys.modules["dask"] is dask


def test_backends_are_found_without_an_error_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(backends: str) -> None:
        asked.append(backends)
        raise AttributeError("of a plugin")

    monkeypatch.setattr("torch.distributed.distributed_c10d.BackendConfig", fail)
    warmup._find_backends()
    assert asked == ["cpu:gloo,cuda:nccl"]


def test_check_of_parameters_is_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr("ddptrain.rank.entrypoint.bind", lambda *given: bound.append(given))
    warmup._import_pydantic()
    ((workload, params),) = bound
    assert workload.__annotations__ == {"ctx": "object", "name": "str", "return": "None"} and params == {"name": ""}
