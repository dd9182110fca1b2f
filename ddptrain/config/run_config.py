"""The models of the YAML file: strict and frozen; editors show the descriptions of the fields."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.rank_settings import LOST_AFTER_S, MAX_PROFILED_STEPS, StepProfile, goal_of
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.config.sections.retraining import DataConfig, ModelsConfig, NotifyConfig, RetrainConfig
from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.config.types import (
    MODULE_PATTERN,
    NAME_PATTERN,
    TARGET_PATTERN,
    FilledText,
    Seconds,
    Strict,
    VariableName,
    Word,
    default_name,
    slug,
    wrong_field,
)


class ScriptWorkload(Strict):
    """A torchrun script: it creates its own process group."""

    script: FilledText | None = Field(
        default=None, description="A Python file, looked for beside the YAML file, then in the working directory."
    )
    module: Annotated[str, Field(pattern=MODULE_PATTERN)] | None = Field(
        default=None, description="A module to run instead of a script, as python -m does."
    )
    args: list[Word] = Field(default_factory=list, description="Its arguments; numbers may stand without quotes.")

    @property
    def description(self) -> str:
        """The arguments of python: "train.py", or "-m package.module"."""
        return self.script or f"-m {self.module}"

    @property
    def run_name(self) -> str:
        """The default name of its runs: the stem of the script, or the last part of the module."""
        parts = (self.module or "").removesuffix(".__main__").split(".")
        return slug(PurePath(self.script).stem if self.script else parts[-1]) or "run"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.script is None and self.module is None:
            raise wrong_field("script", "is required, and not given", "as in {script: train.py}, or {module: a.b}")
        if self.script is not None and self.module is not None:
            raise wrong_field("module", "is given, and so is workload.script", "leave one of them out")
        return self


# The kind is determined first, so that an error mentions only one of them. A tag must not be the name of a field.
Workload = Annotated[
    Annotated[ScriptWorkload, Tag("a script")] | Annotated[FilledText, Tag("function")],
    Discriminator(lambda value: "a script" if isinstance(value, dict | ScriptWorkload) else "function"),
]


class DistConfig(Strict):
    """The process group of the ranks."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="Backend of torch.distributed; auto is nccl on GPUs and gloo on the CPU."
    )
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=None,
        description="Seconds that a collective operation may take; null is torch's own: 600 for nccl, 1800 for gloo.",
    )


class CheckpointConfig(Strict):
    """When checkpoints are saved, and which are kept."""

    every_epochs: Annotated[int, Field(ge=1)] | None = Field(
        default=1, description="Epochs between two checkpoints; null saves none at the end of an epoch."
    )
    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Steps between two checkpoints, within epochs as well; null for none."
    )
    every_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        default=None, description="Seconds between two checkpoints, within epochs as well; null for none."
    )
    asynchronous: bool = Field(
        default=True, description="Whether training goes on while a checkpoint is written, once its state is copied."
    )
    keep: int = Field(default=3, ge=1, description="Checkpoints to keep, besides the best one.")
    metric: Annotated[str, Field(min_length=1)] | None = Field(
        default="val/loss", description="The metric that decides which checkpoint is best; null for none."
    )
    mode: Literal["min", "max"] = Field(
        default="min",
        description="Whether the lowest or the highest metric is best. By default max if the name of the metric has a "
        "word such as accuracy, f1 or score, and min for all others.",
    )


class StopEarlyConfig(Strict):
    """When training ends before its last epoch, as {patience: 5}: after a checkpoint, and the run has succeeded."""

    patience: int = Field(ge=1, description="Values in a row that are no improvement, after which training ends.")
    metric: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A metric that rank 0 logs or gives to ctx.checkpoint; by default checkpoint.metric."
    )
    mode: Literal["min", "max"] | None = Field(
        default=None,
        description="Whether lower or higher is better. By default checkpoint.mode, if it is given for this metric; "
        "else max if the name has a word such as accuracy, f1 or score, and min for all others.",
    )
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="By how much a value must be better to count as an improvement."
    )


class PrepareConfig(Strict):
    """Defaults of the arguments of ctx.prepare."""

    strategy: Literal["ddp", "fsdp", "hybrid"] = Field(
        default="ddp",
        description="ddp: each rank has the whole model; fsdp: all ranks share it; hybrid: the ranks of each host do.",
    )
    shard: list[FilledText] = Field(
        default_factory=list,
        description="Classes of layers that FSDP shards and gathers one at a time, as [Block]; by default the blocks "
        "of the "
        "model's ModuleLists.",
    )
    activation_checkpointing: list[FilledText] = Field(
        default_factory=list,
        description="Classes of layers that are computed again in the backward pass, which saves memory, as [Block].",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Precision of the forward pass; bf16 and fp16 run it under autocast. fp16 also scales the loss.",
    )
    accumulate: int = Field(
        default=1, ge=1, le=100_000, description="Batches of a rank for one step of the optimizer, with ctx.step."
    )
    compile: bool = Field(default=False, description="Whether torch.compile compiles it.")
    channels_last: bool = Field(
        default=False, description="Whether images are stored in the channels_last memory format."
    )


class FailureConfig(Strict):
    """What happens when a rank fails."""

    max_restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Times that ranks are started again after a failure, from the last checkpoint.",
    )
    max_losses: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Times that ranks are started again after their worker was lost or preempted; max_restarts does "
        "not count these.",
    )
    hang_timeout_s: Annotated[Seconds, Field(gt=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="Seconds without any progress of a rank after which a run has hung; null never. auto: 120 s; once "
        "a rank has reported 20 times, 10 times its longest pause so far, at least 40 s, at most 600 s. A rank that "
        "uses its CPU or GPU without an event or a printed line is given six times as long (auto: one hour).",
    )
    lost_after_s: Annotated[Seconds, Field(ge=1)] = Field(
        default=LOST_AFTER_S,
        description="Seconds without a message from a worker, or without the scheduler, after which it counts as "
        "lost; a restart waits half as long for cluster.ranks.max before it takes fewer.",
    )
    nan: Literal["warn", "stop", "ignore"] = Field(
        default="warn",
        description="What happens at the first NaN or infinite value that a rank logs or gives to ctx.checkpoint: warn "
        "shows it, stop ends the run with exit code 1, ignore does nothing. Built-in workloads stop unless this is "
        "given.",
    )
    grace_s: Seconds = Field(default=30.0, ge=0, description="Seconds from SIGTERM to SIGKILL when ranks are stopped.")


class CodeConfig(Strict):
    """The code and the packages that the ranks use on workers that do not have them."""

    ship: bool = Field(default=True, description="Whether code is sent; otherwise workers must have it.")
    folder: FilledText | None = Field(
        default=None, description="The project's folder; by default the git work tree, or the folder of this file."
    )
    environment: FilledText | None = Field(
        default=None,
        description="The packages of the ranks, which uv installs once on each host: uv for those of the project's "
        "uv.lock, or a requirements file that pins every version; null for the packages of the workers.",
    )


class ProfileConfig(Strict):
    """Which steps of which ranks torch.profiler records, as {steps: [10, 13], ranks: [0]}."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] = Field(
        description=f"The first and the last step, counted from 1; at most {MAX_PROFILED_STEPS} steps."
    )
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        default=None, description="The ranks, counted from 0; null is every rank."
    )

    @property
    def spec(self) -> StepProfile:
        """The same for a rank."""
        return StepProfile(self.steps[0], self.steps[1], tuple(self.ranks or ()))

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if problem := self.spec.problem:
            raise wrong_field("steps", *problem)
        return self


class ResultsConfig(Strict):
    """Where results go."""

    dir: FilledText = Field(
        default="runs",
        description="Folder, or URL of an object store, that holds a folder for each run. A relative folder is in the "
        "current directory, which for a cron job is $HOME: write an absolute one, or `cd` there first.",
    )


def _name_for(workload: str | ScriptWorkload) -> str:
    return workload.run_name if isinstance(workload, ScriptWorkload) else default_name(workload)


class RunConfig(Strict):
    """One training run."""

    workload: Workload = Field(
        description="What is trained: a built-in workload's name, package.module:function, or {script: train.py}."
    )
    name: str = Field(
        default_factory=lambda data: _name_for(data["workload"]),
        pattern=NAME_PATTERN,
        description="Begins the run ids; `--resume auto` continues runs of this name. Lower-case letters, digits, "
        "dots, dashes and underscores. By default the name of the YAML file, of the script, or of the built-in "
        "workload.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="The workload's own parameters.")
    env: dict[VariableName, Word] = Field(
        default_factory=dict, description="Environment variables of the ranks, as text.", repr=False
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where the ranks run, and how many there are.")
    dist: DistConfig = Field(default=DistConfig(), description="The process group of the ranks.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When checkpoints are written, and which are kept."
    )
    stop_early: StopEarlyConfig | None = Field(
        default=None, description="When training ends because a metric improves no longer; null never."
    )
    prepare: PrepareConfig = Field(
        default=PrepareConfig(), description="What ctx.prepare does with a model, in workloads that call it."
    )
    failure: FailureConfig = Field(default=FailureConfig(), description="What happens when a rank fails.")
    code: CodeConfig = Field(
        default=CodeConfig(), description="The code that is sent to workers that don't see the project's folder."
    )
    results: ResultsConfig = Field(default=ResultsConfig(), description="Where results go.")
    tracking: TrackingConfig = Field(
        default=TrackingConfig(), description="Where metrics go besides the run directory: W&B, TensorBoard, others."
    )
    profile: ProfileConfig | None = Field(
        default=None, description="Steps that torch.profiler records, in workloads that report steps."
    )
    evaluate: Annotated[str, Field(pattern=TARGET_PATTERN)] | None = Field(
        default=None,
        description="For retrain, of a function: module:function(ctx, checkpoint) that returns the metrics of a "
        "checkpoint; built-in workloads have their own.",
    )
    retrain: RetrainConfig | None = Field(default=None, description="Unattended retraining: `ddptrain retrain`.")
    sweep: SweepConfig | None = Field(default=None, description="Search for the best values: `ddptrain sweep`.")
    data: DataConfig = Field(default=DataConfig(), description="The training data, for the data check of retrain.")
    notify: NotifyConfig = Field(default=NotifyConfig(), description="Notifications of runs and retrainings.")
    models: ModelsConfig = Field(default=ModelsConfig(), description="Where the model registry is.")

    @property
    def script(self) -> ScriptWorkload | None:
        """The workload if it is a script, else None."""
        return self.workload if isinstance(self.workload, ScriptWorkload) else None

    @property
    def workload_name(self) -> str:
        """The name of the workload: "petnames", "mine.train:main", "train.py", "-m package.module"."""
        return self.workload.description if isinstance(self.workload, ScriptWorkload) else self.workload

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend_on_other_sections(cls, data: Any) -> Any:
        match data:
            case {"checkpoint": {"metric": str(metric), **more}} if "mode" not in more and goal_of(metric) == "max":
                data = {**data, "checkpoint": {"metric": metric, **more, "mode": "max"}}
        match data:
            case {"retrain": dict(retrain), "checkpoint": {"metric": str(metric), **more}}:
                mode = more.get("mode", "min")
                if "gate" not in retrain and metric and mode in ("min", "max"):  # errors name the fields of checkpoint
                    data = {**data, "retrain": {**retrain, "gate": {"metric": metric, "mode": mode}}}
        match data:
            case {"stop_early": dict(early)}:
                checkpoint = data.get("checkpoint")
                known = checkpoint if isinstance(checkpoint, dict) else {}
                default = known.get("metric", CheckpointConfig().metric)
                watched = default if early.get("metric") is None else early["metric"]
                if isinstance(watched, str):
                    chosen = (default, known["mode"]) if "mode" in known else ()
                    mode = (goal_of(watched, *chosen) or "min") if early.get("mode") is None else early["mode"]
                    data = {**data, "stop_early": {**early, "metric": watched, "mode": mode}}
        match data:
            case {"workload": str(workload)} if is_built_in(workload):
                failure = data.get("failure", {})
                if isinstance(failure, dict):
                    return {**data, "failure": {"nan": "stop", **failure}}
        return data

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.script is not None and self.params:
            raise wrong_field(
                "params", "is given, but the workload is a script", "a script takes workload.args, as [--lr, 0.1]"
            )
        if self.stop_early is not None and self.stop_early.metric is None:
            raise wrong_field(
                "stop_early.metric", "is missing, and checkpoint.metric is null", "write one, as val/loss"
            )
        if self.evaluate is not None and self.script is not None:
            hint = "its model is judged by the metrics that it gives ctx.checkpoint"
            raise wrong_field("evaluate", "is given, but the workload is a script", hint)
        if self.evaluate is not None and is_built_in(self.workload):
            raise wrong_field("evaluate", f"is given, but {self.workload} has its own evaluation", "leave it out")
        asked = self.retrain is not None and self.retrain.if_unchanged == "skip"
        if asked and not is_built_in(self.workload) and not self.data.sources:
            raise wrong_field(
                "retrain.if_unchanged",
                "is skip, but data.sources is empty, so ddptrain cannot see whether the data have changed",
                "name what the workload reads in data.sources, as [data/], or write if_unchanged: train",
            )
        most, highest = self.cluster.slots, max((self.profile.ranks if self.profile else None) or [0])
        if most is not None and highest >= most:
            hint = f"write ranks from 0 to {most - 1}" if most > 1 else "write [0]"
            raise wrong_field("profile.ranks", f"has {highest}, but the run has at most {most} ranks", hint)
        if self.dist.backend == "nccl" and self.cluster.gpus == 0:
            hint = "write dist.backend: gloo, or leave it at auto"
            raise wrong_field("dist.backend", "is nccl, which needs GPUs, but cluster.gpus is 0", hint)
        return self
