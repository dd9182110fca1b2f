"""Clusters as Slurm jobs: one job runs the scheduler on its first node, and a worker on each node."""

from __future__ import annotations

import math
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddptrain.clusters import processes
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.security import CERT_FILE, KEY_FILE, write_private
from ddptrain.config.sections.clusters import SlurmSettings
from ddptrain.errors import ClusterError, UsageError

_COMMAND_S = 30.0
_END_S = 40.0  # Slurm's own KillWait is 30 s
_POLL_S = 0.2
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


class SlurmBackend(Backend):
    """Runs a worker on each node of a job, with one slot per allocated GPU. The job outlives the submitting shell."""

    tls = True
    own_workers = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Submit the job. Raises ClusterError, UsageError."""
        config, settings = cluster.config, _settings(cluster)
        if config.gpus not in ("auto", 0):
            raise UsageError(
                f"cluster.gpus is {config.gpus}: with backend slurm it is auto or 0; cluster.slurm.gres asks for GPUs"
            )
        each, nodes = settings.ranks_per_node, settings.nodes
        if config.slots is not None and each == "auto":
            each = math.ceil(config.slots / nodes)
        elif config.slots is not None:
            nodes = math.ceil(config.slots / int(each))
        cluster.workers = nodes
        folder = _made_folder(cluster)
        # The name finds the job even if the command is killed while it submits it.
        part = Part(role="job", id=f"ddptrain-{cluster.name}-{secrets.token_hex(4)}", log=str(folder))
        yield part
        path = folder / "job.sh"
        write_private(path, script(cluster, part.id, nodes, None if each == "auto" else each).encode())
        answer = _call("sbatch", "--parsable", str(path))
        job = answer.strip().splitlines()[-1].partition(";")[0]
        tell(f"job {job}: the scheduler and {f'{nodes} workers' if nodes > 1 else 'a worker'}")
        yield part.model_copy(update={"id": f"{part.id} {job}"})

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return that the job has ended, or None."""
        job = next((part.id.partition(" ")[2] for part in cluster.parts), "")
        return f"job {job} has ended" if job and not _listed(cluster) else None

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the logs of scheduler, workers and the job; for a job that waits, the reason."""
        folder = _folder(cluster)
        found = {}
        for path in sorted(folder.glob("*.log")):
            source = path.stem.replace("-", " ", 1) if path.stem != "scheduler" else path.stem
            found[source] = processes.tail(str(folder), path.stem, lines)
        for job in _listed(cluster):
            if job.state != "RUNNING":
                found[f"job {job.id}"] = f"{found.get(f'job {job.id}', '')}{job.description}\n"
        return found

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """Cancel the job, and wait until Slurm has ended it. Raises ClusterError."""
        if jobs := _listed(cluster):
            ids = [job.id for job in jobs]
            _call("scancel", *ids, passes=_OVER)
            tell(f"cancelled job {', '.join(ids)}")
        deadline = time.monotonic() + _END_S
        while left := _listed(cluster):
            if time.monotonic() > deadline:
                raise ClusterError(f"Slurm has not ended within {_END_S:g} s: {left[0].description}")
            time.sleep(_POLL_S)
        if cluster.shared:
            shutil.rmtree(cluster.shared, ignore_errors=True)


def _settings(cluster: ClusterRecord) -> SlurmSettings:
    assert cluster.config.slurm is not None
    return cluster.config.slurm


def _folder(cluster: ClusterRecord) -> Path:
    return Path(cluster.shared or cluster.folder)


def _made_folder(cluster: ClusterRecord) -> Path:
    """Return the folder for the files of the job, created on the shared file system if one is configured."""
    chosen = _settings(cluster).folder
    if chosen is None:
        return cluster.folder
    folder = Path(chosen).expanduser().absolute() / f"ddptrain-{cluster.name}-{secrets.token_hex(4)}"
    cluster.shared = str(folder)
    cluster.save()
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ClusterError(f"cluster.slurm.folder {chosen} can't be used: {error.strerror}") from error
    for name in (CERT_FILE, KEY_FILE):
        write_private(folder / name, (cluster.folder / name).read_bytes())
    return folder


def _listed(cluster: ClusterRecord) -> list[Job]:
    """Return the job if it has not ended. Raises ClusterError if squeue fails."""
    names = [part.id.partition(" ")[0] for part in cluster.parts]
    if not names:
        return []
    answer = _call("squeue", "--noheader", "--me", "--name", ",".join(names), "--format", "%F|%T|%r", passes=_OVER)
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 2]
    return [Job(*(cell.strip() for cell in row)) for row in rows]


def _call(program: str, *arguments: str, passes: re.Pattern[str] | None = None) -> str:
    """Return the output of a Slurm command. Raises ClusterError with its last line on failure, unless it `passes`."""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it: its answer says what has been submitted
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


def script(cluster: ClusterRecord, name: str, nodes: int, slots: int | None) -> str:
    """Return the batch script; `slots` of each node, None for one per GPU. All values from the settings are quoted."""
    settings, folder = _settings(cluster), _folder(cluster)
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "output": folder / "job-%j.log",
        "open-mode": "append",
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "gres": settings.gres,
        "cpus-per-task": slots,
    }
    stated = [f"#SBATCH --{option}={_quoted(value)}" for option, value in options.items() if value is not None]
    # Slurm takes the last of several equal options.
    stated += [f"#SBATCH {line.removeprefix('#SBATCH').strip()}" for line in settings.directives]
    lines = ["#!/bin/bash", *stated, "", "umask 077", *settings.setup, *_commands(cluster, slots)]
    return "\n".join([*lines, ""])


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH directive, where Slurm knows double quotes and backslashes."""
    text = str(value)
    return text if not set(text) & set(" \"'\\#") else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _commands(cluster: ClusterRecord, slots: int | None) -> list[str]:
    """Start the scheduler in the background, and run a worker on each node until it ends or the job is cancelled."""
    python, folder = _settings(cluster).python or sys.executable, _folder(cluster)
    scheduler = [python, "-P", "-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder)]
    scheduler += ["--idle-timeout", str(cluster.config.idle_timeout_s)]
    address = f'"$({shlex.quote(python)} -c {shlex.quote(_ADDRESS)})"'
    log = shlex.quote(str(folder / "scheduler.log"))
    worker = [python, "-P", "-m", "ddptrain.worker", "--scheduler-file", f"{folder}/scheduler.json"]
    worker += ["--timeout", f"{cluster.config.start_timeout_s:g}", "--slots", str(slots or 0)]
    worker += ["--gpus", "none" if cluster.config.gpus == 0 else "auto", "--tls-dir", str(folder)]
    name = 'name="$SLURMD_NODENAME-$SLURM_JOB_ID"'
    inner = f'{name}; exec {shlex.join(worker)} --name "$name" >>{shlex.quote(f"{folder}/worker-")}"$name".log 2>&1'
    run = ["srun", "--mpi=none", "--wait=0", "--kill-on-bad-exit=0", "--cpu-bind=none", "--export=ALL", "--input=none"]
    return [
        f"{shlex.join(scheduler)} --host {address} >>{log} 2>&1 &",
        "scheduler=$!",
        "trap 'kill $scheduler; wait $scheduler' EXIT",
        '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',  # srun does not inherit it
        f"{shlex.join(run)} bash -c {shlex.quote(inner)}",
    ]
