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
