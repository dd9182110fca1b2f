"""What a warm rank server has imported."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from ddptrain.rank.server import process_control, warmup
warmup.import_everything()
wanted = ["torch", "torch._dynamo", "torch.nn.parallel", "safetensors.torch", "dask_pytorch_ddp.dispatch"]
import dask
print(json.dumps({
    "imported": [name in sys.modules for name in wanted],
    "dask_is_real": hasattr(dask, "compute"),
    "cuda": sys.modules["torch"].cuda.is_initialized(),
    "threads": process_control.thread_count(),
}))
"""


def test_warm_server_has_torch_and_dynamo_but_no_thread_no_cuda_and_no_false_dask() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110, env={"OPENBLAS_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == {"imported": [True] * 5, "dask_is_real": True, "cuda": False, "threads": 1}


RANK = """
import importlib.metadata, json, sys
from ddptrain.rank.server import warmup
warmup.import_everything()
known, searches = set(sys.modules), []
importlib.metadata.entry_points = lambda **group: searches.append(group) or []
from ddptrain.rank.entrypoint import bind
def workload(ctx, folder: str, steps: int = 1): ...
bind(workload, {"folder": "x"})
from ddptrain.rank.steps import step_clock, waiting_time
from torch.distributed.distributed_c10d import BackendConfig
BackendConfig("gloo")
import weakref
finalizers = weakref.finalize._registry.values()
left = [str(each.func) for each in finalizers if each.atexit and "_del_library" in str(each.func)]
print(json.dumps({"new": sorted(set(sys.modules) - known), "searches": searches, "at_exit": left}))
"""


def test_forked_rank_imports_and_searches_nothing_before_its_workload_and_ends_without_torchs_clean_up() -> None:
    ended = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"new": [], "searches": [], "at_exit": []}
