"""The interfaces of backends: `Cluster` for the driver, `Backend` for the commands `ddptrain cluster ...`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.clusters.record import ClusterRecord, Part
    from ddptrain.clusters.resolve import Target
    from ddptrain.config.sections.clusters import ClusterConfig

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DriverJob:
    """A driver that a batch system starts for the run of `folder`; its environment has JOB.

    words: the command and its arguments as typed; the `options` follow its name. config: the configuration with all
    changes, and with its secrets, for a host that does not have its file.
    """

    name: str
    run_id: str
    folder: Path
    words: Sequence[str]
    options: Sequence[str]
    config: Mapping[str, Any]


class Cluster(Protocol):
    """A Dask cluster with slots for ranks, during one run. What a subclass leaves out does nothing."""

    @property
    def description(self) -> str:
        """The name of the cluster for messages."""

    def begin(self) -> None:
        """Start everything that takes long, without waiting for it."""
        return

    def connect(self) -> Target:
        """Start the processes that do not run yet; return the scheduler's address. Raises ClusterError."""

    def worker_fault(self) -> str | None:
        """Return why a worker that this object has started has ended; None while all run."""
        return None

    def replace_workers(self, *, leaving: bool) -> None:
        """Replace workers of this object that have ended or will end soon (`leaving`)."""
        return

    def last_words(self) -> str:
        """Return the last log lines of the workers, if available: for the error that too few workers have joined."""
        return ""

    def close(self) -> None:
        """End everything that this object has started; an attached cluster keeps running."""
        return


class Backend(Protocol):
    """Starts and ends the processes, jobs or pods of a cluster that outlives the command.

    `tls` says that its clusters need a certificate. `own_workers` says that the workers are `ddptrain.worker` of this
    version, so that nobody has to check what they have.
    """

    tls: ClassVar[bool] = False
    own_workers: ClassVar[bool] = False

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Start the scheduler and the workers, and yield each part, which the caller saves before it goes on.

        A part that can't be found by its name alone is yielded before it is started, and again when more is known of
        it; one that is waited for is yielded again and again. Between two parts the command may be interrupted.
        `cluster.workers` is set to the expected number, `cluster.address` if no scheduler.json will have it. Does not
        wait for workers to join. Raises ClusterError, UsageError.
        """

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return why a part has ended or will never run; None if all run, or it is not known. Raises ClusterError."""

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the last log lines of each process, by source, also of failed ones."""

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """End everything that `start` has started, even partly, and wait for its end. Raises ClusterError."""

    def submit(self, config: ClusterConfig, driver: DriverJob) -> str:
        """Have the driver started in a job, again when it ends with 75; return the job's id. Raises ClusterError."""
        raise UsageError(
            f"--submit is for cluster.backend slurm or kubernetes, and this one is {config.backend}: --detach lets the "
            "driver continue on this host without this shell"
        )

    def job_state(self, job: str) -> str:
        """Return the state of a submitted job, as "PENDING (Resources)" or "RUNNING"; "" if it has ended or is ending.

        Raises ClusterError if the batch system can't be asked.
        """
        return ""

    def cancel_job(self, job: str) -> None:
        """End a submitted job. Raises ClusterError."""

    def restart_job(self, job: str) -> None:
        """Have the job of this process, which has ended with 75, started again. Raises ClusterError."""
