"""The sections of `cluster:` in the YAML file, one model for each backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ddptrain.config.types import FilledText, Line, Ranks, Strict, SystemText, VariableName


def _no_option(host: str) -> str:
    if host.startswith("-"):
        raise ValueError("is no host: ssh would take it for an option")
    return host


SshTarget = Annotated[Line, AfterValidator(_no_option)]


def slots_to_order(ranks: Literal["auto"] | int | Mapping[str, int], slots: int | None) -> int | None:
    """Return the number of slots of a cluster: `slots` of the command, else the setting `cluster.ranks`.

    A range stands for its maximum. None means "auto": as many as the hosts have.
    """
    if slots is not None:
        return slots
    if isinstance(ranks, Mapping):
        return ranks["max"]
    return None if ranks == "auto" else int(ranks)


class TlsSettings(Strict):
    """The certificate for a foreign cluster."""

    ca_file: FilledText = Field(description="PEM file of the authority that signed the scheduler's certificate.")
    cert_file: FilledText = Field(description="PEM file of the certificate to show.")
    key_file: FilledText = Field(description="PEM file of that certificate's key.")


class SshSettings(Strict):
    """Hosts that are reached by ssh; the first one also runs the scheduler."""

    hosts: list[SshTarget] = Field(
        min_length=1, description="Hosts, as ssh knows them: [user@]name; the first is the scheduler's."
    )
    ranks_per_host: Literal["auto"] | Ranks = Field(
        default="auto", description="Slots on each host; auto is one per GPU, or one per 2 CPU cores."
    )
    python: Line = Field(default="python3", description="Python on the hosts, where ddptrain is installed.")
    command: Line = Field(default="ssh", description="The ssh client.")
    options: list[SystemText] = Field(default_factory=list, description="More arguments for ssh, as [-o, Port=2222].")
    scheduler_host: Line | None = Field(
        default=None, description="Address by which the other hosts reach the first one; by default ssh's HostName."
    )
    env: dict[VariableName, SystemText] = Field(
        default_factory=dict, description="Environment variables of the processes there, as text.", repr=False
    )


class SlurmSettings(Strict):
    """A Slurm job for scheduler and workers."""

    nodes: Ranks = Field(default=1, description="Nodes, one worker each.")
    ranks_per_node: Literal["auto"] | Ranks = Field(
        default="auto", description="Slots on each node; auto is one per GPU, or one per 2 CPU cores."
    )
    partition: Line | None = Field(default=None, description="Partition of the job.")
    account: Line | None = Field(default=None, description="Account that is charged.")
    qos: Line | None = Field(default=None, description="Quality of service.")
    time: Line | None = Field(default=None, description="Time limit, as 04:00:00.")
    gres: Line | None = Field(default=None, description="Generic resources a node, as gpu:8.")
    cpus_per_task: Ranks | None = Field(default=None, description="CPUs of each worker.")
    mem: Line | None = Field(default=None, description="Memory of each node, as 64G.")
    array: bool = Field(default=False, description="Workers as an array job: each joins as soon as its node is free.")
    directives: list[Line] = Field(default_factory=list, description="More #SBATCH lines, as --constraint=a100.")
    setup: list[Line] = Field(default_factory=list, description="Shell lines to run first, as module load cuda.")
    python: Line | None = Field(default=None, description="Python on the nodes; by default the one that runs this.")
    folder: FilledText | None = Field(
        default=None, description="Folder for the job's files, on a file system shared with the nodes."
    )
    env: dict[VariableName, SystemText] = Field(
        default_factory=dict, description="Environment variables of the job, as text.", repr=False
    )


class SaturnSettings(Strict):
    """Saturn Cloud, through dask-saturn; the token comes only from SATURN_TOKEN."""

    url: Line | None = Field(default=None, description="Where Saturn is; by default SATURN_BASE_URL.")
    workers: Ranks = Field(default=1, description="Machines for workers, where --ranks tells no other number.")
    worker_size: Line | None = Field(default=None, description="Size of a worker's machine, as g4dnxlarge.")
    worker_is_spot: bool | None = Field(default=None, description="Whether workers run on spot instances.")
    scheduler_size: Line | None = Field(default=None, description="Size of the scheduler's machine, as large.")
    nprocs: Ranks = Field(default=1, description="Workers on each machine, a slot each.")
    nthreads: Ranks | None = Field(default=None, description="Threads of each worker.")


class KubernetesResources(Strict):
    """Resources of a worker's container: a quantity for each, as memory: 32Gi."""

    requests: dict[str, str | int | float] = Field(default_factory=dict, description="The guaranteed resources.")
    limits: dict[str, str | int | float] = Field(default_factory=dict, description="The upper limits.")


class KubernetesSettings(Strict):
    """Pods of the operator of dask-kubernetes."""

    image: Line = Field(description="Container image, with ddptrain installed.")
    namespace: Line | None = Field(default=None, description="Namespace; by default the context's own.")
    context: Line | None = Field(default=None, description="Context of the kubeconfig; by default the current one.")
    workers: Ranks = Field(default=1, description="Worker pods, where --ranks tells no other number.")
    gpus_per_worker: int = Field(default=0, ge=0, le=1024, description="GPUs of each worker pod, a slot each.")
    ranks_per_worker: Ranks = Field(default=1, description="Slots of each worker pod, where it has no GPUs.")
    resources: KubernetesResources = Field(
        default=KubernetesResources(), description="Requests and limits of a worker's container."
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels of the nodes to run on.")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="Taints that are tolerated.")
    env: dict[VariableName, SystemText] = Field(
        default_factory=dict, description="Environment variables of the containers, as text.", repr=False
    )
    volumes: list[dict[str, Any]] = Field(default_factory=list, description="Volumes of the worker pods.")
    volume_mounts: list[dict[str, Any]] = Field(
        default_factory=list, description="Where the volumes are mounted, as {name: data, mountPath: /data}."
    )
    service_account: Line | None = Field(default=None, description="Service account of the pods.")
    scheduler_service_type: Literal["ClusterIP", "LoadBalancer"] = Field(
        default="ClusterIP",
        description="How the scheduler is reached from outside: ClusterIP by a port-forward, or a LoadBalancer.",
    )
