"""A host that is lost, and a restart that waits for it."""

from __future__ import annotations

from tests.pains.problem import Play, Problem, Show
from tests.pains.scene import Scene


def _agents() -> Play:
    def play(scene: Scene) -> None:
        agent = (
            "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint"
        )
        agent += f" localhost:{scene.free_port()} train.py"
        first = scene.start(agent)
        first.until("nothing", 1.0)
        second = scene.start(agent)
        first.until("step 3|trains")
        scene.kill_tree(second)
        scene.record("(the agent on the second host, and its rank, were killed after step 3)")
        first.finish(25)

    return play


def _workers() -> Play:
    def play(scene: Scene) -> None:
        scene.start("dask scheduler --host 127.0.0.1 --port 0 --no-dashboard --scheduler-file scheduler.json")
        scene.wait_for("scheduler.json")
        options = "--scheduler-file scheduler.json --nthreads 1 --no-nanny --no-dashboard"
        workers = [scene.start(f"dask worker {options}") for _ in range(2)]
        for worker in workers:
            worker.until("Registered to|Starting established connection")
        run = scene.start(
            "ddptrain run --cluster scheduler.json --set 'cluster.ranks={min: 1, max: 2}' --set "
            "failure.max_losses=1 --set failure.rejoin_wait_s=2 train.py"
        )
        run.until("step 3")
        scene.kill_tree(workers[1])
        scene.record("(one of two Dask workers, and its rank, were killed after step 3)")
        run.finish()

    return play


PROBLEM = Problem(
    name="lost-host",
    title="A host is lost, and the restart hangs",
    happens=(
        "One of two hosts is gone. The launcher of the other starts its ranks again, and waits for the host that "
        "never comes."
    ),
    threads=("pytorch/pytorch#111646", "pytorch/pytorch#147064", "pytorch/pytorch#182221"),
    files={
        "train.py": """
import time

import torch.distributed as dist

dist.init_process_group("gloo")
print("trains with", dist.get_world_size(), "ranks", flush=True)
for step in range(1, 21):
    dist.barrier()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    time.sleep(0.3)
dist.destroy_process_group()
""",
    },
    peer=Show(
        _agents(),
        must=("nothing more for 25 s", "step 3"),
        never=("step 20",),
        keep=("trains with", "step (3|20)$", "RuntimeError", "SIGKILL", "rendezvous"),
    ),
    ours=Show(
        _workers(),
        must=("trains with 2 ranks", "trains with 1 ranks", "succeeded"),
        keep=("ddptrain:", "trains with", "step (3|20)$", "^run "),
    ),
    avoided=(
        "A lost worker ends the attempt at once. `failure.max_losses` starts another on the slots that are left, "
        "after `failure.rejoin_wait_s` (30 s): "
        "see [Preemption](checkpoints.md#preemption) and [Scale](scale.md)."
    ),
    equal="torchrun with `--nnodes 1:2` can continue on one host, when its keep-alive limits are over.",
)
