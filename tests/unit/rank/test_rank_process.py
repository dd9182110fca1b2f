"""The process of a rank, and its imports before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ddptrain.rank.entrypoint import load_function

# --- How a rank finds its function, and how its process is set up ---


def test_function_is_found_by_its_module_and_name() -> None:
    assert load_function("json:dumps").__name__ == "dumps"


def test_missing_function_is_an_error_with_the_existing_names() -> None:
    with pytest.raises(AttributeError, match=r"'dumbs'; it has .*dumps"):
        load_function("json:dumbs")


# --- What a warm rank server has imported ---


PROGRAM = """
import importlib.metadata, json, sys
from ddptrain.rank import process_control, warmup
warmup.import_everything()
threads = len(process_control.thread_names())
wanted = ["torch", "torch._dynamo", "torch.nn.parallel", "safetensors.torch", "dask_pytorch_ddp.dispatch"]
imported = [name in sys.modules for name in wanted]
known, searches = set(sys.modules), []
importlib.metadata.entry_points = lambda **group: searches.append(group) or []
from ddptrain.rank.entrypoint import bind
def workload(ctx, folder: str, steps: int = 1): ...
bind(workload, {"folder": "x"})
import ddptrain.rank.steps
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
