"""The batch scripts that Slurm runs for a cluster."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The address of the interface with the default route: the node's name often resolves to 127.0.1.1.
_ADDRESS = """import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
    try:
        way.connect((\"10.255.255.255\", 1))
        print(way.getsockname()[0])
    except OSError:
        print(socket.gethostname())
"""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a job requests. `slots` None: one per GPU of the worker; `array`: number of elements, 0 for no array."""

    name: str
    folder: Path
    nodes: int
    slots: int | None
    python: str
    tls: bool
    gpus: bool
    start_timeout_s: float
    slurm: Mapping[str, Any]
    array: int = 0

    def as_array(self, elements: int) -> JobPlan:
        """The same job as an array with that many elements, one node each."""
        return dataclasses.replace(self, nodes=1, array=elements)


def script(plan: JobPlan, lines: Sequence[str]) -> str:
    """The complete script. All values from the settings are quoted."""
    return "\n".join(["#!/bin/bash", *_directives(plan), "", "umask 077", *plan.slurm["setup"], *lines, ""])


def _directives(plan: JobPlan) -> list[str]:
    given = plan.slurm
    element = "_%a" if plan.array else ""
    options = {
        "job-name": plan.name,
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "output": plan.folder / f"job-{'%A' if plan.array else '%j'}{element}.log",
        "open-mode": "append",
        "partition": given["partition"],
        "account": given["account"],
        "qos": given["qos"],
        "time": given["time"],
        "gres": given["gres"],
        "cpus-per-task": given["cpus_per_task"] or plan.slots,
        "mem": given["mem"],
        "array": f"0-{plan.array - 1}" if plan.array else None,
    }
    stated = [f"#SBATCH --{name}={_quoted(value)}" for name, value in options.items() if value is not None]
    return [*stated, *(f"#SBATCH {line.removeprefix('#SBATCH').strip()}" for line in given["directives"])]


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH directive, where Slurm knows double quotes and backslashes."""
    text = str(value)
    return text if not set(text) & set(" \"'\\#") else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def scheduler_lines(plan: JobPlan, idle_timeout_s: float, *, alone: bool = True) -> list[str]:
    """Start the scheduler on the job's first node, in the background unless it is `alone` in the job."""
    python = shlex.quote(plan.python)
    command = [plan.python, "-P", "-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(plan.folder)]
    command += ["--idle-timeout", str(idle_timeout_s)]
    log = shlex.quote(str(plan.folder / "scheduler.log"))
    line = f'{shlex.join(command)} --host "$({python} -c {shlex.quote(_ADDRESS)})" >>{log} 2>&1'
    if alone:
        return [f"exec {line}"]
    return [f"{line} &", "scheduler=$!", "trap 'kill $scheduler; wait $scheduler' EXIT"]


def worker_lines(plan: JobPlan) -> list[str]:
    """Run a worker on each node of the job, until the scheduler ends or the job is cancelled."""
    folder = str(plan.folder)
    command = [plan.python, "-P", "-m", "ddptrain.worker", "--scheduler-file", f"{folder}/scheduler.json"]
    command += ["--timeout", f"{plan.start_timeout_s:g}", "--slots", str(plan.slots or 0)]
    command += ["--gpus", "auto" if plan.gpus else "none"]
    if plan.tls:
        command += ["--tls-dir", folder]
    # The name of the worker consists of node and job, so it is unique.
    name = 'name="$SLURMD_NODENAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"'
    log = f'{shlex.quote(f"{folder}/worker-")}"$name".log'
    inner = f'{name}; exec {shlex.join(command)} --name "$name" >>{log} 2>&1'
    run = ["srun", "--mpi=none", "--wait=0", "--kill-on-bad-exit=0", "--cpu-bind=none", "--export=ALL", "--input=none"]
    cpus = plan.slurm["cpus_per_task"] or plan.slots
    run += [f"--cpus-per-task={cpus}"] if cpus else []
    return [f"{shlex.join(run)} bash -c {shlex.quote(inner)}"]
