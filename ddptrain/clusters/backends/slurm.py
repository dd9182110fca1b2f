"""Clusters as Slurm jobs: a scheduler on the first node, and a worker on each node.

Outside of a job, a cluster is a job of its own. Inside one (SLURM_JOB_ID is set), the same commands run in that job.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from ddptrain.clusters import processes
from ddptrain.clusters.provider import Backend, DriverJob, Tell
from ddptrain.clusters.record import ClusterRecord, Part, ended
from ddptrain.clusters.security import CERT_FILE, KEY_FILE, write_private
from ddptrain.config.sections.clusters import ClusterConfig, SlurmSettings
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError, UsageError
from ddptrain.protocol.exec_env import JOB

_COMMAND_S = 30.0
_END_S = 40.0  # Slurm's own KillWait is 30 s
_POLL_S = 0.2
_OVER = re.compile(r"invalid job id|no such job", re.IGNORECASE)
_WARNING = "B:TERM@120"  # to the driver, which is the batch step: so many seconds before the time limit


class SlurmBackend(Backend):
    """Runs a worker on each node of a job, with one slot per allocated GPU."""

    tls = True
    own_workers = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Submit a job, or start the processes in the job of this process. Raises ClusterError, UsageError."""
        config, settings, job = cluster.config, _settings(cluster.config), os.environ.get("SLURM_JOB_ID")
        nodes, slots = _room(config, None if job is None else int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
        if settings.container_image and "--container-image" not in _call("srun", "--help"):
            raise ClusterError(
                "cluster.slurm.container_image needs Slurm's plugin pyxis: `srun --help` has no --container-image "
                "here; have pyxis installed, or leave the field out"
            )
        cluster.workers = nodes
        folder = _made_folder(cluster)
        lines = [*settings.setup, *_commands(cluster, nodes, slots)]
        what = f"the scheduler and {counted(nodes, 'worker')}"
        if job is not None:
            pid = processes.start(str(folder), "job", ["bash", "-c", "\n".join(lines), str(folder)])
            tell(f"in job {job}: {what}")
            yield Part(role="job", host=socket.gethostname(), id=str(folder), log=str(folder), pid=pid)
            return
        # The name finds the job even if the command is killed while it submits it.
        part = Part(role="job", id=f"ddptrain-{cluster.name}-{secrets.token_hex(4)}", log=str(folder))
        yield part
        options = {"job-name": part.id, "output": folder / "job-%j.log"}
        new = _submitted(folder / "job.sh", batch_script(config, nodes, slots, options, ["umask 077", *lines]))
        tell(f"job {new}: {what}")
        yield part.model_copy(update={"id": f"{part.id} {new}"})

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return that the job, or what runs in the job of this process, has ended; or None."""
        job = next((part.id.partition(" ")[2] for part in cluster.parts), "")
        return f"job {job} has ended" if job and not _listed(cluster) else ended(cluster.parts)

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the logs of scheduler, workers and the job; for a job that waits, the reason."""
        folder = _folder(cluster)
        found = {}
        for path in sorted(folder.glob("*.log")):
            source = path.stem.replace("-", " ", 1) if path.stem != "scheduler" else path.stem
            found[source] = processes.tail(str(folder), path.stem, lines)
        for job, state in _listed(cluster).items():
            if state != "RUNNING":
                found[f"job {job}"] = f"{found.get(f'job {job}', '')}job {job} is {state}\n"
        return found

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """Cancel the job, and wait until Slurm has ended it. Raises ClusterError."""
        processes.end(str(_folder(cluster)))
        if jobs := _listed(cluster):
            _call("scancel", *jobs, passes=_OVER)
            tell(f"cancelled job {', '.join(jobs)}")
        deadline = time.monotonic() + _END_S
        while left := _listed(cluster):
            if time.monotonic() > deadline:
                job, state = next(iter(left.items()))
                raise ClusterError(f"Slurm has not ended within {_END_S:g} s: job {job} is {state}")
            time.sleep(_POLL_S)
        if cluster.shared:
            shutil.rmtree(cluster.shared, ignore_errors=True)

    def submit(self, config: ClusterConfig, driver: DriverJob) -> str:
        """See Backend. The driver is the batch step, which starts the workers of its job."""
        nodes, slots = _room(config, None)
        log, folder = driver.folder / "driver.log", os.getcwd()
        options = {"job-name": driver.name, "output": log, "chdir": folder, "requeue": "", "signal": _WARNING}
        mark = f'export {JOB}="slurm $SLURM_JOB_ID {driver.run_id}"'
        command, *words = driver.words
        command = shlex.join([sys.executable, "-P", "-m", "ddptrain", command, *driver.options, *words])
        lines = [*_settings(config).setup, mark, f"exec {command}"]
        return _submitted(driver.folder / "job.sh", batch_script(config, nodes, slots, options, lines))

    def job_state(self, job: str) -> str:
        """See Backend."""
        return _states("--jobs", job).get(job, "")

    def cancel_job(self, job: str) -> None:
        """See Backend."""
        _call("scancel", job, passes=_OVER)

    def restart_job(self, job: str) -> None:
        """See Backend. Slurm ends this process in a moment."""
        _call("scontrol", "requeue", job)


def _settings(config: ClusterConfig) -> SlurmSettings:
    assert config.slurm is not None
    return config.slurm


def _room(config: ClusterConfig, present: int | None) -> tuple[int, int | None]:
    """Return the number of nodes, and of slots on each, None for one per GPU. Raises UsageError.

    present: the nodes of the job of this process; None outside of a job.
    """
    settings = _settings(config)
    if config.gpus not in ("auto", 0):
        raise UsageError(
            f"cluster.gpus is {config.gpus}: with backend slurm it is auto or 0; cluster.slurm.gres asks for GPUs"
        )
    each = None if settings.ranks_per_node == "auto" else settings.ranks_per_node
    nodes = present if present is not None and "nodes" not in settings.model_fields_set else settings.nodes
    if config.slots is not None and each is None:
        each = math.ceil(config.slots / nodes)
    elif config.slots is not None and each is not None:
        nodes = math.ceil(config.slots / each)
    if present is not None and nodes > present:
        raise UsageError(f"{nodes} nodes are asked for, and this job has {present}: ask for fewer ranks or nodes")
    return nodes, each


def _folder(cluster: ClusterRecord) -> Path:
    return Path(cluster.shared or cluster.folder)


def _made_folder(cluster: ClusterRecord) -> Path:
    """Return the folder for the files of the job, created on the shared file system if one is configured."""
    chosen = _settings(cluster.config).folder
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


def _listed(cluster: ClusterRecord) -> dict[str, str]:
    """Return the cluster's own job, if it has not ended; see _states."""
    names = [part.id.partition(" ")[0] for part in cluster.parts if part.pid is None]
    return _states("--me", "--name", ",".join(names)) if names else {}


def _states(*chosen: str) -> dict[str, str]:
    """Return the states of the jobs that have not ended, by id, as "PENDING (Resources)". Raises ClusterError."""
    answer = _call("squeue", "--noheader", *chosen, "--format", "%F|%T|%r", passes=_OVER)
    rows = [line.strip().split("|") for line in answer.splitlines() if line.count("|") == 2]
    return {job: state if why in ("", "None") else f"{state} ({why})" for job, state, why in rows}


def _submitted(path: Path, text: str) -> str:
    """Write a batch script, and submit it; return the id of its job. Raises ClusterError."""
    write_private(path, text.encode())
    return _call("sbatch", "--parsable", str(path)).strip().splitlines()[-1].partition(";")[0]


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


def batch_script(
    config: ClusterConfig, nodes: int, slots: int | None, options: Mapping[str, object], lines: Sequence[str]
) -> str:
    """Return a batch script that runs `lines` on the first of the nodes, with room for the slots of each.

    The values of the settings are quoted; an option with the value "" is a flag.
    """
    settings = _settings(config)
    options = {
        **options,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "gres": settings.gres,
        "cpus-per-task": slots,
    }
    given = {option: value for option, value in options.items() if value is not None}
    stated = [f"--{option}" if value == "" else f"--{option}={_quoted(value)}" for option, value in given.items()]
    # Slurm takes the last of several equal options.
    stated += [line.removeprefix("#SBATCH").strip() for line in settings.directives]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {each}" for each in stated), "", *lines, ""])


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH directive, where Slurm knows double quotes and backslashes."""
    text = str(value)
    return text if not set(text) & set(" \"'\\#") else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _commands(cluster: ClusterRecord, nodes: int, slots: int | None) -> list[str]:
    """Run the scheduler here and a worker on each node, in a job; at the end of either, end the other."""
    settings, folder = _settings(cluster.config), _folder(cluster)
    inside = [f"--container-image={settings.container_image}"] if settings.container_image else []
    if inside:
        inside.append(f"--container-mounts={','.join([f'{folder}:{folder}', *settings.container_mounts])}")
    scheduler = [sys.executable if inside else settings.python or sys.executable, "-P", "-m"]
    scheduler += ["ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder), "--host", "auto"]
    scheduler += ["--idle-timeout", str(cluster.config.idle_timeout_s)]
    worker = [settings.python or ("python3" if inside else sys.executable), "-P", "-m", "ddptrain.worker"]
    worker += ["--scheduler-file", f"{folder}/scheduler.json", "--tls-dir", str(folder), "--slots", str(slots or 0)]
    worker += ["--timeout", f"{cluster.config.start_timeout_s:g}"]
    worker += ["--gpus", "none" if cluster.config.gpus == 0 else "auto"]
    name = 'name="$SLURMD_NODENAME-$SLURM_JOB_ID"'
    task = f'{name}; exec {shlex.join(worker)} --name "$name" >>{shlex.quote(f"{folder}/worker-")}"$name".log 2>&1'
    # --overlap: other steps may use the same CPUs and GPUs.
    run = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mpi=none"]
    run += ["--wait=0", "--kill-on-bad-exit=0", "--cpu-bind=none", "--export=ALL", "--input=none", *inside]
    return [
        # What the job asked for per task, or the step of this shell, is not for the workers: each gets its node's part.
        "unset $(compgen -e | grep -E '^(SLURM|SRUN)_' | grep -vE '^SLURM_(CONF|JOB_ID|WORKING_CLUSTER)$')",
        f"{shlex.join(scheduler)} >>{shlex.quote(str(folder / 'scheduler.log'))} 2>&1 &",
        f"{shlex.join(run)} bash -c {shlex.quote(task)} &",
        "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT",
        "wait -n",
    ]
