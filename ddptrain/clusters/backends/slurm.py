"""Clusters as Slurm jobs. The first job runs the scheduler and workers; further jobs run more workers."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.clusters import processes
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.security import CERT_FILE, KEY_FILE, write_private
from ddptrain.clusters.status import client_of
from ddptrain.config.sections.clusters import slots_to_order
from ddptrain.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from distributed import Client

_COMMAND_S = 30.0
_END_S = 40.0  # Slurm's own KillWait is 30 s
_POLL_S = 0.2
_LINKED = ("scheduler.json", "ended.json")
_OVER = re.compile(r"invalid job id|no such job", re.IGNORECASE)
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
class Job:
    """A job in the output of squeue: its state and, while it waits, the reason."""

    id: str
    state: str
    reason: str

    @property
    def description(self) -> str:
        """The state as in: job 12 is PENDING (Resources)."""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.id} is {self.state}{why}"


class SlurmProvider:
    """Runs a worker on each node of a job, with one slot per allocated GPU. The jobs outlive the submitting shell."""

    tls = True

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Submit jobs for missing slots, or cancel jobs and shrink workers. Raises ClusterError, UsageError."""
        if not _jobs_of(cluster):
            _submit_first(cluster, slots, tell)
            return
        with client_of(cluster) as client:
            _resize(cluster, int(slots or 0), client, tell)

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the logs of scheduler, workers and jobs; for a job that waits, the reason."""
        folder = _folder(cluster)
        found = {}
        for path in sorted(folder.glob("*.log")):
            source = path.stem.replace("-", " ", 1) if path.stem != "scheduler" else path.stem
            found[source] = processes.tail(str(folder), path.stem, lines)
        for job in _listed(_jobs_of(cluster)):
            if job.state != "RUNNING":
                found[f"job {job.id}"] = f"{found.get(f'job {job.id}', '')}{job.description}\n"
        return found

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """Cancel all jobs, and wait until Slurm has ended them. Raises ClusterError."""
        ids = _jobs_of(cluster)
        if ids:
            _call("scancel", *ids, passes=_OVER)
            tell(f"cancelled job {', '.join(ids)}")
        deadline = time.monotonic() + _END_S
        while left := _listed(ids):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Slurm has not ended within {_END_S:g} s: {'; '.join(job.description for job in left)}"
                )
            time.sleep(_POLL_S)
        folder = _folder(cluster)
        if folder != cluster.folder:
            shutil.rmtree(folder, ignore_errors=True)

    def fault(self, cluster: Deployment) -> str | None:
        """Return the name of the job that has ended, or None."""
        ids = _jobs_of(cluster)
        listed = {job.id for job in _listed(ids)}
        gone = [job for job in ids if job not in listed]
        return f"job {', '.join(gone)} has ended" if gone else None


def _submit_first(cluster: Deployment, slots: int | None, tell: Tell) -> None:
    settings = cluster.record.settings
    if settings["gpus"] not in ("auto", 0):
        raise UsageError(
            f"cluster.gpus is {settings['gpus']}: with backend slurm it is auto or 0; cluster.slurm.gres asks for GPUs"
        )
    folder = _made_folder(cluster)
    each = settings["slurm"]["ranks_per_node"]
    wanted = slots_to_order(settings["ranks"], slots)
    nodes = int(settings["slurm"]["nodes"])
    if wanted is not None and each == "auto":
        each = math.ceil(wanted / nodes)
    elif wanted is not None:
        nodes = math.ceil(wanted / int(each))
    per_node = None if each == "auto" else int(each)
    plan = _plan(cluster, folder, nodes, per_node)
    cluster.update(workers=nodes)
    idle_s = cluster.record.idle_timeout_s
    if settings["slurm"]["array"]:
        _submit(cluster, dataclasses.replace(plan, nodes=1), scheduler_lines(plan, idle_s), tell, what="the scheduler")
        _submit(cluster, plan.as_array(nodes), worker_lines(plan), tell, what=f"{nodes} workers")
        return
    what = f"the scheduler and {nodes} workers" if nodes > 1 else "the scheduler and a worker"
    _submit(cluster, plan, [*scheduler_lines(plan, idle_s, alone=False), *worker_lines(plan)], tell, what=what)


def _plan(cluster: Deployment, folder: Path, nodes: int, per_node: int | None) -> JobPlan:
    settings = cluster.record.settings
    return JobPlan(
        name=f"ddptrain-{cluster.name}",
        folder=folder,
        nodes=nodes,
        slots=per_node,
        python=settings["slurm"]["python"] or sys.executable,
        tls=cluster.tls_dir is not None,
        gpus=settings["gpus"] != 0,
        start_timeout_s=float(settings["start_timeout_s"]),
        slurm=settings["slurm"],
    )


def _submit(cluster: Deployment, plan: JobPlan, lines: Sequence[str], tell: Tell, *, what: str) -> None:
    """Submit a job and save its number. Raises ClusterError with the message of sbatch."""
    path = plan.folder / f"job-{len(_jobs_of(cluster)) + 1}.sh"
    write_private(path, script(plan, lines).encode())
    answer = _call("sbatch", "--parsable", str(path), env=plan.slurm["env"])
    job = answer.strip().splitlines()[-1].partition(";")[0]
    cluster.update(parts={**cluster.record.parts, "jobs": [*_jobs_of(cluster), job]})
    tell(f"job {job}: {what}")


def _resize(cluster: Deployment, wanted: int, client: Client, tell: Tell) -> None:
    from ddptrain.clusters.scheduler import slots
    from ddptrain.worker import driver_calls

    workers = client.run_on_scheduler(slots.overview)["workers"]
    total = sum(worker["slots"] for worker in workers)
    if wanted > total:
        each = max([int(worker["slots"]) for worker in workers], default=1)
        nodes = math.ceil((wanted - total) / each)
        plan = _plan(cluster, _folder(cluster), nodes, min(each, wanted - total))
        cluster.update(workers=len(workers) + nodes)
        _submit(cluster, plan.as_array(nodes), worker_lines(plan), tell, what=f"{nodes} workers more")
        return
    for job in reversed(_jobs_of(cluster)[1:]):
        # The job is in the name of a worker: n1-17, or n1-17_3 in an array.
        of_job = [worker for worker in workers if worker["name"].rpartition("-")[2].partition("_")[0] == job]
        spare = sum(worker["slots"] for worker in of_job)
        if of_job and total - spare >= wanted and not any(worker["held"] for worker in of_job):
            _call("scancel", job, passes=_OVER)
            cluster.update(parts={**cluster.record.parts, "jobs": [each for each in _jobs_of(cluster) if each != job]})
            tell(f"cancelled job {job}")
            total -= spare
            workers = [worker for worker in workers if worker not in of_job]
    for worker in reversed(workers):
        if (fewer := min(total - wanted, worker["slots"] - 1)) > 0:
            client.run(driver_calls.set_slots, worker["slots"] - fewer, workers=[worker["address"]])
            total -= fewer
    cluster.update(workers=len(workers))


def _listed(ids: Sequence[str]) -> list[Job]:
    """Return the jobs that have not ended. Raises ClusterError if squeue fails."""
    if not ids:
        return []
    answer = _call("squeue", "--noheader", "--jobs", ",".join(ids), "--format", "%F|%T|%r", passes=_OVER)
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 2]
    return list({row[0].strip(): Job(*(cell.strip() for cell in row)) for row in rows}.values())


def _call(
    program: str, *arguments: str, passes: re.Pattern[str] | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Return the output of a Slurm command. Raises ClusterError with its last line on failure, unless it `passes`."""
    try:
        done = subprocess.run(
            [program, *arguments],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no {program} here: backend slurm needs Slurm's commands on a submit host"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{program} did not answer within {_COMMAND_S:g} s: is Slurm's controller down?") from error
    if done.returncode and not (passes and passes.search(done.stderr)):
        error_lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ClusterError(f"{shlex.join([program, *arguments][:2])}: {error_lines[-1]}")
    return done.stdout


def _made_folder(cluster: Deployment) -> Path:
    """Return the folder for files of the jobs, on the shared file system; the cluster's folder has links to them."""
    chosen = cluster.record.settings["slurm"]["folder"]
    if chosen is None:
        return cluster.folder
    folder = Path(chosen).expanduser().absolute() / f"ddptrain-{cluster.name}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ClusterError(f"cluster.slurm.folder {chosen} can't be used: {error.strerror}") from error
    cluster.update(parts={**cluster.record.parts, "folder": str(folder)})
    for name in (CERT_FILE, KEY_FILE) if cluster.tls_dir else ():
        write_private(folder / name, (cluster.folder / name).read_bytes())
    for name in _LINKED:
        (cluster.folder / name).symlink_to(folder / name)
    return folder


def _folder(cluster: Deployment) -> Path:
    return Path(cluster.record.parts.get("folder", cluster.folder))


def _jobs_of(cluster: Deployment) -> list[str]:
    return list(cluster.record.parts.get("jobs", []))


# --- the batch scripts ---


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
        """Return the same job as an array with that many elements, one node each."""
        return dataclasses.replace(self, nodes=1, array=elements)


def script(plan: JobPlan, lines: Sequence[str]) -> str:
    """Return the complete script. All values from the settings are quoted."""
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
        "time": given["time"],
        "gres": given["gres"],
        "cpus-per-task": plan.slots,
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
    run += [f"--cpus-per-task={plan.slots}"] if plan.slots else []
    return [f"{shlex.join(run)} bash -c {shlex.quote(inner)}"]
