"""The section `cluster:` of the YAML file, and its sections for the backends."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from ddptrain.config.plugin_names import Registry
from ddptrain.config.types import (
    MOST_RANKS,
    NAME_PATTERN,
    Duration,
    FilledText,
    Line,
    Ranks,
    SchedulerAddress,
    Seconds,
    Strict,
    SystemText,
    wrong_field,
)
from ddptrain.config.wording import describe_value, did_you_mean
from ddptrain.errors import UsageError

# The class that starts a backend's clusters; "" if the cluster already runs.
BACKENDS = Registry(
    {
        "local": "ddptrain.clusters.backends.local:LocalBackend",
        "address": "",
        "ssh": "ddptrain.clusters.backends.ssh:SshBackend",
        "slurm": "ddptrain.clusters.backends.slurm:SlurmBackend",
        "kubernetes": "ddptrain.clusters.backends.kubernetes:KubernetesBackend",
        "class": "ddptrain.clusters.backends.dask_class:DaskClassBackend",
    },
    "ddptrain.clusters",
)


def _no_option(host: str) -> str:
    if host.startswith("-"):
        raise ValueError("is not a host: ssh would read it as an option")
    return host


SshTarget = Annotated[Line, AfterValidator(_no_option)]


class SshSettings(Strict):
    """Hosts that are reached by ssh; the first one also runs the scheduler."""

    hosts: list[SshTarget] = Field(
        min_length=1, description="Hosts, as ssh knows them: [user@]name; the first is the scheduler's."
    )
    ranks_per_host: Literal["auto"] | Ranks = Field(
        default="auto", description="Slots on each host; auto is one per GPU, or one per 2 CPU cores."
    )
    python: Line = Field(default="python3", description="Python on the hosts, where ddptrain is installed.")
    options: list[SystemText] = Field(default_factory=list, description="More arguments for ssh, as [-o, Port=2222].")
    scheduler_host: Line | None = Field(
        default=None, description="Address by which the other hosts reach the first one; by default ssh's HostName."
    )


class SlurmSettings(Strict):
    """A Slurm job for scheduler and workers; in a job, that job is used, with all its nodes by default."""

    nodes: Ranks = Field(default=1, description="Nodes, one worker each.")
    ranks_per_node: Literal["auto"] | Ranks = Field(
        default="auto", description="Slots on each node; auto is one per GPU, or one per 2 CPU cores."
    )
    partition: Line | None = Field(default=None, description="Partition of the job.")
    account: Line | None = Field(default=None, description="Account that is charged.")
    time: Line | None = Field(default=None, description="Time limit, as 04:00:00.")
    gres: Line | None = Field(default=None, description="Generic resources a node, as gpu:8.")
    directives: list[Line] = Field(
        default_factory=list, description="More #SBATCH lines, as --mem=64G or --cpus-per-task=16."
    )
    setup: list[Line] = Field(default_factory=list, description="Shell lines to run first, as module load cuda.")
    python: Line | None = Field(default=None, description="Python on the nodes; by default the one that runs this.")
    container_image: Line | None = Field(
        default=None, description="Image of the workers' containers, which have ddptrain; needs the plugin pyxis."
    )
    container_mounts: list[Line] = Field(default_factory=list, description="Mounts there, as /data:/data:ro.")
    folder: FilledText | None = Field(
        default=None, description="Folder for the job's files, on a file system shared with the nodes."
    )


class KubernetesSettings(Strict):
    """Pods that kubectl starts."""

    image: Line = Field(description="Container image, with ddptrain installed.")
    namespace: Line | None = Field(default=None, description="Namespace; by default the context's own.")
    context: Line | None = Field(default=None, description="Context of the kubeconfig; by default the current one.")
    workers: Ranks = Field(default=1, description="Worker pods; --ranks takes precedence.")
    gpus_per_worker: int = Field(default=0, ge=0, le=1024, description="GPUs of each worker pod, a slot each.")
    ranks_per_worker: Ranks = Field(default=1, description="Slots of each worker pod, if it has no GPUs.")
    resources: dict[Literal["requests", "limits"], dict[str, str | int | float]] = Field(
        default_factory=dict, description="Of a worker's container, as {requests: {memory: 32Gi}}."
    )
    volumes: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Volumes of the worker pods, and where they are mounted, as "
        "{name: data, mountPath: /data, persistentVolumeClaim: {claimName: data}}.",
    )
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the pods' spec, as {nodeSelector: {...}, tolerations: [...], serviceAccountName: ml}.",
    )


def _known_backend(name: str) -> str:
    if name in BACKENDS.built_in or name in (known := BACKENDS.names()):
        return name
    raise wrong_field("", f"there is no such cluster backend, got {describe_value(name)}", did_you_mean(name, known))


BACKEND_FIELDS = ("ssh", "slurm", "kubernetes", "address", "class")  # the fields that only the backend of that name has
_REQUIRED = {  # backend -> the field that it needs, and what to write
    "ssh": ("ssh.hosts", "write cluster.ssh.hosts, or --host NAME"),
    "kubernetes": (
        "kubernetes.image",
        "write cluster.kubernetes.image, or --set cluster.kubernetes.image=IMAGE",
    ),
    "address": ("address", "give the scheduler's address, as tcp://host:8786, or its file, as ./scheduler.json"),
    "class": ("class", "name it as package.Cluster"),
}


class RankRange(Strict):
    """The lowest and highest number of ranks."""

    min: Ranks = Field(description="With fewer the run does not start, nor continue after a loss.")
    max: Ranks = Field(description="More are not used.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise wrong_field("min", f"is {self.min}, above max, which is {self.max}", "swap them")
        return self


# The kind is determined first, so that an error mentions only one of them.
_AnyRanks = Annotated[
    Annotated[RankRange, Tag("range")] | Annotated[Literal["auto"] | Ranks, Tag("number")],
    Discriminator(lambda value: "range" if isinstance(value, dict | RankRange) else "number"),
]


class ClusterConfig(Strict):
    """Where the ranks run, and how many there are."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        default=None, description="A cluster that `ddptrain cluster up` has started, or will start under this name."
    )
    backend: Annotated[str, AfterValidator(_known_backend)] = Field(
        default="local",
        description="Where workers come from: local, address, ssh, slurm, kubernetes, class, or another name.",
        json_schema_extra={"examples": [*BACKENDS.built_in]},
    )
    address: SchedulerAddress | None = Field(
        default=None,
        description="The scheduler of a cluster that is up, as tcp://host:8786, or the file that `dask scheduler "
        "--scheduler-file` wrote, as ./scheduler.json; for backend address only.",
    )
    ranks: _AnyRanks = Field(
        default="auto",
        description="Training processes; auto is one per GPU, or one per 2 CPU cores and at least 2; "
        "{min: 2, max: 8} takes what there is.",
    )
    gpus: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_RANKS)] = Field(
        default="auto", description="GPUs to use; auto is all there are, 0 trains on the CPU."
    )
    start_timeout_s: Seconds = Field(default=60.0, gt=0, description="Seconds that the cluster may take to start.")
    wait_s: Annotated[Duration, Field(ge=0)] = Field(
        default=0.0,
        description="Seconds, or a time as 2h, to wait in line for slots that other runs hold; 0 does not wait.",
    )
    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Runs that wait in line get slots in the order of their priority, the highest first, and equal "
        "ones in the order of their arrival.",
    )
    idle_timeout_s: Seconds = Field(
        default=0.0, ge=0, description="Seconds without a run after which a cluster ends by itself; 0 is never."
    )
    ssh: SshSettings | None = Field(default=None, description="For backend ssh.")
    slurm: SlurmSettings | None = Field(default=None, description="For backend slurm.")
    kubernetes: KubernetesSettings | None = Field(default=None, description="For backend kubernetes.")
    class_: FilledText | None = Field(
        default=None,
        alias="class",
        description="For backend class: any distributed.deploy.Cluster, as package.Cluster.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="For backend class: the arguments of the class; for a backend of another package its settings.",
    )

    @property
    def slots(self) -> int | None:
        """The slots that a cluster needs for `ranks`, of a range its maximum; None for auto."""
        if isinstance(self.ranks, RankRange):
            return self.ranks.max
        return None if self.ranks == "auto" else self.ranks

    @property
    def class_name(self) -> str:
        """The class of backend class, as package.Cluster; "" for other backends."""
        return self.class_ or ""

    @property
    def is_attached(self) -> bool:
        """Whether the cluster runs already, and keeps running after the run."""
        return self.name is not None or self.backend == "address"

    @property
    def is_embedded(self) -> bool:
        """Whether the cluster is part of the driver and ends with the run."""
        return self.name is None and self.backend == "local"

    @model_validator(mode="before")
    @classmethod
    def _backend_and_its_section_imply_each_other(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        implied = [field for field in BACKEND_FIELDS if data.get(field) is not None]
        if implied and "backend" not in data:
            data = {**data, "backend": implied[0]}
        return {**data, "slurm": {}} if data.get("backend") == "slurm" and data.get("slurm") is None else data

    @model_validator(mode="after")
    def _fields_go_with_the_backend(self) -> Self:
        given = {field: getattr(self, "class_" if field == "class" else field) for field in BACKEND_FIELDS}
        for field, value in given.items():
            if value is not None and self.backend != field:
                raise _misplaced(field, self.backend, field)
        if self.backend in _REQUIRED and given[self.backend] is None:
            field, hint = _REQUIRED[self.backend]
            raise wrong_field(field, f"is required, as cluster.backend is {self.backend}", hint)
        if self.kwargs and self.backend in BACKENDS.built_in and self.backend != "class":
            raise _misplaced("kwargs", self.backend, "class")
        return self


def _misplaced(field: str, backend: str, wanted: str) -> Exception:
    return wrong_field(
        field, f"is given, but cluster.backend is {backend}", f"write cluster.backend: {wanted}, or leave it out"
    )


class ClusterFile(Strict):
    """A file with only a `cluster` section."""

    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where the ranks run, and how many there are.")


def provider_class(name: str) -> type[Any]:
    """Import a backend's class (see clusters/provider.py). Raises UsageError if it has none, or it can't be used."""
    target = BACKENDS.target(name)
    if not target:
        raise UsageError(f"cluster.backend {name} uses a cluster that is up: there is nothing to start or to end")
    module, _, attribute = target.partition(":")
    try:
        return cast("type[Any]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cluster.backend {name} ({target}) can't be used: {error}") from error
