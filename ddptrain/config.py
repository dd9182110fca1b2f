"""What a run is made of: strict, frozen models of the YAML file, each field with a line that editors show."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
# Longer waits overflow timedelta and poll() further down.
_A_YEAR_S = 31_536_000
_MOST_RANKS = 65_536


def slug(text: str) -> str:
    """The nearest thing to `text` that is a valid run name, or "" where nothing of it can stay."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:64].rstrip("-")


def default_name(workload: str, stem: str = "") -> str:
    """The name of a run that was given none: a built-in's, or the file's stem, or the function's name."""
    module, _, function = workload.rpartition(":")
    return slug(stem if module and slug(stem) else function) or "run"


def wrong_field(field: str, message: str, hint: str) -> PydanticCustomError:
    """An error of a check over several fields; `field` is the dotted key, below the model, that is blamed."""
    return PydanticCustomError("wrong_field", "{message}", {"field": field, "message": message, "hint": hint})


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character, which the system does not take")
    return text


def _variable_name(name: str) -> str:
    if not name or "=" in name:
        raise ValueError('is no name for an environment variable: it is empty or holds "="')
    return _without_nul(name)


def _scheduler_address(text: str) -> str:
    if not re.fullmatch(r"((tcp|tls|ws|wss|ucx)://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", text):
        raise ValueError("is no scheduler's address: expected something like tcp://host:8786")
    return text


SystemText = Annotated[str, AfterValidator(_without_nul)]
# The length comes first, so that an error speaks of characters.
FilledText = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
VariableName = Annotated[str, AfterValidator(_variable_name)]
Seconds = Annotated[float, Field(le=_A_YEAR_S)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClusterConfig(_Strict):
    """Where the ranks run, and how many there are."""

    backend: Literal["local", "address"] = Field(
        default="local",
        description="Where workers come from: local starts them here, address uses a cluster that is up.",
    )
    address: Annotated[SystemText, AfterValidator(_scheduler_address)] | None = Field(
        default=None,
        description="The scheduler of a cluster that is up, as tcp://host:8786; for backend address only.",
    )
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST_RANKS)] = Field(
        default="auto",
        description="Training processes; auto is one per GPU, or one per 2 CPU cores and at least 2.",
    )
    gpus: Literal["auto"] | Annotated[int, Field(ge=0, le=_MOST_RANKS)] = Field(
        default="auto", description="GPUs to use; auto is all there are, 0 trains on the CPU."
    )
    start_timeout_s: Seconds = Field(default=60.0, gt=0, description="Seconds that the cluster may take to start.")
    wait_s: Seconds = Field(default=0.0, ge=0, description="Seconds to wait for free slots; 0 fails at once.")

    @model_validator(mode="after")
    def _address_goes_with_its_backend(self) -> Self:
        if self.backend == "address" and self.address is None:
            raise wrong_field(
                "address",
                "is required, as cluster.backend is address",
                "give the scheduler's address, as tcp://host:8786",
            )
        if self.backend != "address" and self.address is not None:
            raise wrong_field(
                "address",
                f"is given, but cluster.backend is {self.backend}",
                "write cluster.backend: address, or leave the address out",
            )
        return self


class DistConfig(_Strict):
    """The process group of the ranks."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="Backend of torch.distributed; auto is nccl on GPUs and gloo on the CPU."
    )
    timeout_s: Seconds = Field(default=300.0, gt=0, description="Seconds that a collective operation may take.")


class CheckpointConfig(_Strict):
    """When checkpoints are written, and which are kept."""

    every_epochs: int = Field(default=1, ge=1, description="Epochs from one checkpoint to the next.")
    keep: int = Field(default=3, ge=1, description="Checkpoints to keep, besides the best one.")
    metric: Annotated[str, Field(min_length=1)] | None = Field(
        default="val/loss", description="The metric that decides which checkpoint is best; null for none."
    )
    mode: Literal["min", "max"] = Field(default="min", description="Whether the lowest or the highest metric is best.")


class FailureConfig(_Strict):
    """What happens when a rank fails."""

    grace_s: Seconds = Field(default=30.0, ge=0, description="Seconds from SIGTERM to SIGKILL when ranks are stopped.")


class ResultsConfig(_Strict):
    """Where results go."""

    dir: FilledText = Field(default="runs", description="Folder that holds a folder for each run.")


class RunConfig(_Strict):
    """One training run."""

    workload: FilledText = Field(description="What is trained: a built-in workload's name, or package.module:function.")
    name: str = Field(
        default_factory=lambda data: default_name(data["workload"]),
        pattern=NAME_PATTERN,
        description="Name of the run: lower-case letters, digits, dots, dashes and underscores.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="The workload's own parameters.")
    env: dict[VariableName, SystemText] = Field(
        default_factory=dict, description="Environment variables of the ranks, as text.", repr=False
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where the ranks run, and how many there are.")
    dist: DistConfig = Field(default=DistConfig(), description="The process group of the ranks.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When checkpoints are written, and which are kept."
    )
    failure: FailureConfig = Field(default=FailureConfig(), description="What happens when a rank fails.")
    results: ResultsConfig = Field(default=ResultsConfig(), description="Where results go.")

    @model_validator(mode="after")
    def _nccl_has_gpus(self) -> Self:
        if self.dist.backend == "nccl" and self.cluster.gpus == 0:
            raise wrong_field(
                "dist.backend",
                "is nccl, which needs GPUs, but cluster.gpus is 0",
                "write dist.backend: gloo, or leave it at auto",
            )
        return self
