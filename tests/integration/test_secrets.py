"""The key of W&B is where it is needed, in the ranks' environment, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler

from tests.conftest import Cli
from tests.unit.worker.daskbench import DaskBench
from tests.unit.worker.stubs import until

KEY = "5ecre7" * 7  # wandb takes none that is shorter than 40
WORKLOAD = """
import hashlib, os, time

def wait(ctx, until):
    ctx.log({"train/loss": 1.0}, step=1)
    print("key", hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest(), flush=True)
    while not os.path.exists(until):
        time.sleep(0.02)
"""


def _all_of_scheduler() -> Any:
    """All that a scheduler holds of tasks and messages, as bytes; a function in a function travels by value."""

    def dump(dask_scheduler: Scheduler) -> bytes:
        import cloudpickle

        parts: list[Any] = [str(dask_scheduler.get_events())]
        for state in dask_scheduler.tasks.values():
            parts += [cloudpickle.dumps(state.run_spec), repr(state), str(state.annotations)]
        return b"\n".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)

    return dump


def _arguments() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.timeout(180)
def test_key_reaches_ranks_on_a_cluster_of_others_and_nobody_else(tmp_path: Path, run_cli: Cli) -> None:
    for name in ("tmp", "cluster"):
        (tmp_path / name).mkdir()
    (tmp_path / "work.py").write_text(WORKLOAD)
    config: dict[str, Any] = {"workload": "work:wait", "params": {"until": str(tmp_path / "go")}}
    config |= {"cluster": {"ranks": 1}, "tracking": {"wandb": {"mode": "rank0"}}, "env": {"OWN_PASSWORD": KEY[::-1]}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    cluster_env = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with DaskBench(tmp_path / "cluster", {**os.environ, **cluster_env}) as bench:
        bench.scheduler()
        bench.foreign()
        env = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
        running = run_cli.start("train", "run.yaml", "--cluster", bench.scheduler_file, "--full-traceback", env=env)
        running.wait_for(f"key {hashlib.sha256(KEY.encode()).hexdigest()}")
        address = json.loads(bench.scheduler_file.read_text())["address"]
        with Client(address, set_as_default=False, timeout=20) as client:
            (run,) = (tmp_path / "runs").iterdir()
            until(lambda: list((run / "tracking/wandb").glob("offline-run-*/*.wandb")), "the run is recorded")
            held = client.run_on_scheduler(_all_of_scheduler())
        arguments = _arguments()
        (tmp_path / "go").touch()
        ended = running.finish()
        assert ended.rc == 0, ended.stderr
        said = [path.read_text() for path in (tmp_path / "cluster").glob("*.log")]
    secrets = (KEY, KEY[::-1])
    assert run.name.encode() in held, "the spec was there to be seen"
    assert not any(secret.encode() in held for secret in secrets)
    assert not any(secret in text for secret in secrets for text in [*arguments, *said, ended.stdout, ended.stderr])
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not [path for path, data in kept.items() for secret in secrets if secret.encode() in data]
