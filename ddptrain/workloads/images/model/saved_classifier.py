"""Loads the model of an image run, for `predict` and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ddptrain.errors import UsageError
from ddptrain.workloads.checkpoint import check_workload, checkpoint_folder, load_checkpoint
from ddptrain.workloads.images.model.build_model import build
from ddptrain.workloads.images.params import architectures
from ddptrain.workloads.images.prediction_tables import answer_names

_MOST_OUTPUTS = 100_000

Names = Annotated[list[str], Field(min_length=1, max_length=_MOST_OUTPUTS)]
Size = Annotated[int, Field(ge=1, le=4096)]
Option = Literal["image_size", "input_size", "aux_logits", "init_weights", "transform_input"]  # not those of its depth
ThreeNumbers = Annotated[list[float], Field(min_length=3, max_length=3)]


class SavedConfig(BaseModel):
    """The `model_config` of a checkpoint, validated, because checkpoints may come from other users.

    outputs: the model's output for each of the data set's `classes`. mean, std: per channel, of pixels from 0 to 1.
    options: arguments of torchvision's builder.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    architecture: str
    options: dict[Option, bool | Size | Annotated[list[Size], Field(max_length=2)]] = Field(default_factory=dict)
    n_outputs: int = Field(ge=1, le=_MOST_OUTPUTS)
    image_size: int = Field(ge=8, le=2048)
    mean: ThreeNumbers
    std: Annotated[list[Annotated[float, Field(gt=0.0)]], Field(min_length=3, max_length=3)]
    classes: Names
    outputs: list[int]
    output_names: Names

    @field_validator("architecture")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in architectures():
            raise ValueError(f"there is no model {name[:80]!r} here; is torchvision older than in the run?")
        return name

    @model_validator(mode="after")
    def _all_outputs_have_names(self) -> Self:
        if len(self.output_names) != self.n_outputs:
            raise ValueError(f"{self.n_outputs} outputs have {len(self.output_names)} names")
        if len(self.outputs) != len(self.classes) or len(set(self.outputs)) != len(self.outputs):
            raise ValueError("each class needs an output of its own")
        if not all(0 <= output < self.n_outputs for output in self.outputs):
            raise ValueError(f"an output of a class is not one of the {self.n_outputs}")
        return self

    @classmethod
    def restored(cls, stored: Any) -> SavedConfig:
        """Validate the description in a checkpoint. Raises UsageError."""
        try:
            return cls.model_validate(stored)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"the checkpoint does not contain an image classifier: {f'{where}: ' if where else ''}{first['msg']}; "
                "was it made by this version?"
            ) from None


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model in evaluation mode on the CPU, and the name of each output: that of its class, if it has one."""

    model: torch.nn.Module
    config: SavedConfig
    names: tuple[str, ...]
    checkpoint: str


def load_model(run_dir: Path) -> SavedModel:
    """Return the model of the best (or else the latest) checkpoint of a run.

    Raises UsageError if the run is of another workload, or has no readable checkpoint.
    """
    check_workload(run_dir, "images", "predict")
    folder = checkpoint_folder(run_dir)
    model, config = load_classifier(folder)
    return SavedModel(model, config, tuple(answer_names(config.model_dump())), folder.name)


def load_classifier(folder: Path) -> tuple[torch.nn.Module, SavedConfig]:
    """Return the model of a checkpoint's folder, and its description. Raises UsageError if it is not readable."""
    configs: list[SavedConfig] = []

    def built(stored: Any) -> torch.nn.Module:
        configs.append(SavedConfig.restored(stored))
        return build(configs[0].model_dump())

    return load_checkpoint(folder, "images", built), configs[0]
