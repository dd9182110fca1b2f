"""A real Slurm on this machine: munge, slurmctld and two nodes, with keys, ports and folders of the test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S
from tests.servers.ports import free_ports

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_NODES = ("n1", "n2")


@dataclass(frozen=True, slots=True)
class Slurm:
    """A Slurm that runs; `env` is what its commands need."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """For processes that submit jobs."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def call(self, *command: str) -> str:
        """What a command prints."""
        environment = {**os.environ, **self.env}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def jobs(self) -> str:
        """The jobs that have not ended."""
        return self.call("squeue", "--noheader")


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """The daemons, for as long as the block lasts; skips the test where Slurm is missing or does not start."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root")
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]:
        pytest.skip(f"no Slurm here: {', '.join(missing)} is not installed")
    for name in ("munge", "state", *(f"spool-{node}" for node in _NODES)):
        (folder / name).mkdir(parents=True, mode=0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    made = Slurm(folder)
    (folder / "slurm.conf").write_text(_configuration(folder, free_ports(1 + len(_NODES))))
    started: list[subprocess.Popen[bytes]] = []
    try:
        munge = ["--foreground", f"--socket={folder}/munge/s", f"--key-file={folder}/munge.key"]
        munge += [
            f"--pid-file={folder}/munge/pid",
            f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        ]
        started.append(_started(made, ["munged", "--force", "--num-threads=1", *munge]))
        _wait_for((folder / "munge" / "s").exists, made, "munged")
        started.append(_started(made, ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"]))
        started += [_started(made, ["slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node]) for node in _NODES]
        _wait_for(lambda: _idle_nodes(made) >= 2 * len(_NODES), made, "slurmd")
        yield made
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle_nodes(made: Slurm) -> int:
    """Idle nodes, each counted once in each of the two partitions."""
    try:
        return made.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except subprocess.SubprocessError:
        return 0


def _started(made: Slurm, command: list[str]) -> subprocess.Popen[bytes]:
    with (made.folder / f"{command[0]}.out").open("ab") as said:
        path = shutil.which(command[0], path=_PATH) or command[0]
        environment = {**os.environ, **made.env}
        return subprocess.Popen(
            [path, *command[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )


def _wait_for(condition: object, made: Slurm, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            said = "".join(path.read_text(errors="replace")[-500:] for path in made.folder.glob("*.out"))
            pytest.skip(f"Slurm does not run here ({what}): {said}")
        time.sleep(0.1)


def _configuration(folder: Path, ports: list[int]) -> str:
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
        for node, port in zip(_NODES, ports[1:], strict=True)
    ]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={folder}/munge/s,cred_expire=5",  # a job that is queued again waits that long
        f"SlurmctldPort={ports[0]}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/none",
        "KillWait=5",
        "MailProg=/bin/true",
        "InactiveLimit=0",
        *nodes,
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=closed Nodes=ALL State=DOWN",
    ]
    return "\n".join(lines) + "\n"
