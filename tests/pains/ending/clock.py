"""A clock that is set while ranks train."""

from __future__ import annotations

from tests.pains.problem import Problem, Show
from tests.pains.scene import Command, Scene


def _jump(scene: Scene, printing: Command) -> None:
    """Set the clock when a rank has printed step 3."""
    printing.until("step 3")
    scene.write("jumped", "")
    scene.record("(the clock is set an hour ahead after step 3)")


def _two_agents(scene: Scene) -> None:
    agent = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint"
    agent += f" localhost:{scene.free_port()} train.py"
    other = scene.start(f"torchrun {agent}")
    other.until("nothing", 2.0)  # so that it is the one that has rank 0
    watched = scene.start(f"PYTHONPATH=. python shifted.py {agent}")
    _jump(scene, other)
    watched.finish(30)
    other.finish(5)


def _one_driver(scene: Scene) -> None:
    command = scene.start("PYTHONPATH=. ddptrain run --ranks 2 train.py")
    _jump(scene, command)
    command.finish()


PROBLEM = Problem(
    name="clock",
    title="A clock that is set while ranks train",
    happens=(
        "Launchers compare times of the clocks of several hosts, or measure silence with a clock that can be set "
        "(NTP, a "
        "suspended machine). Hosts with wrong clocks were seen to drop out of a run."
    ),
    threads=("pytorch/pytorch#76287",),
    files={
        "sitecustomize.py": '''
"""Python imports this first: its clock is an hour ahead as soon as the file `jumped` exists."""

import os
import time

real_time, real_ns = time.time, time.time_ns


def ahead() -> int:
    return 3600 if os.path.exists("jumped") else 0


time.time = lambda: real_time() + ahead()
time.time_ns = lambda: real_ns() + ahead() * 10**9
''',
        "train.py": """
import time

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 41):
    dist.barrier()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    time.sleep(0.4)
dist.destroy_process_group()
""",
    },
    peer_files={
        "shifted.py": '''
"""torchrun, whose agent uses the clock through datetime: it is set like time.time."""

import datetime

import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
from sitecustomize import ahead
from torch.distributed.run import main


class Clock:
    @staticmethod
    def now(zone):
        return datetime.datetime.now(zone) + datetime.timedelta(seconds=ahead())


rendezvous.datetime = Clock
main()
''',
    },
    peer=Show(
        _two_agents, must=("step 40", r"(exit code 0[\s\S]*){2}"), keep=("step (3|4|40)$", "Error", "rendezvous")
    ),
    ours=Show(
        _one_driver,
        must=("step 40", "exit code 0"),
        keep=("ddptrain:", "step (3|4|40)$", "^run "),
    ),
    avoided=(
        "Silence, time limits and hangs are measured by the monotonic clock; the lock of a run does not compare "
        "clocks of hosts: see [Failure](design.md#failure)."
    ),
    equal=(
        "A clock that is set between two rendezvous does not disturb torchrun either; its agents compare times "
        "when hosts join."
    ),
)
