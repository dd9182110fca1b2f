"""Image models, and the plain description from which the model of a checkpoint is built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor, nn

from ddptrain.errors import UsageError
from ddptrain.workloads.checkpoint import check_workload, checkpoint_folder, load_checkpoint
from ddptrain.workloads.images.params import SMALL_CNN, architectures

# ImageNet's, per channel: nearly all of torchvision's weights were trained with them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_MOST_OUTPUTS = 100_000
_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


class SmallCnn(nn.Module):
    """Three convolutions and a linear layer, about 25,000 parameters, for small images of any size."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(3, 16),
            nn.MaxPool2d(2, ceil_mode=True),
            *_convolution(16, 32),
            nn.MaxPool2d(2, ceil_mode=True),
            *_convolution(32, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(64, n_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, n_outputs] for images [n, 3, h, w]."""
        scores: Tensor = self.head(self.features(images))
        return scores


def _convolution(before: int, after: int) -> Sequence[nn.Module]:
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)


def describe(
    architecture: str,
    image_size: int,
    classes: Sequence[str],
    *,
    outputs: Sequence[int] | None = None,
    output_names: Sequence[str] | None = None,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> dict[str, Any]:
    """Return the description of a model and its outputs, as plain data.

    outputs: the model's output for each class; by default one output per class. output_names: of all outputs, if there
    are others than the classes. mean, std: per channel, of pixels from 0 to 1.
    """
    return {
        "architecture": architecture,
        "n_outputs": len(classes if output_names is None else output_names),
        "image_size": image_size,
        "mean": list(mean),
        "std": list(std),
        "classes": list(classes),
        "outputs": list(range(len(classes)) if outputs is None else outputs),
        "output_names": list(classes if output_names is None else output_names),
        "options": _options(architecture, image_size),
    }


def build(model_config: Mapping[str, Any]) -> nn.Module:
    """Build the model of a description, with random weights.

    Raises UsageError if the architecture does not exist, or does not support the image size.
    """
    architecture, n_outputs = model_config["architecture"], model_config["n_outputs"]
    if architecture == SMALL_CNN:
        return SmallCnn(n_outputs)
    from torchvision import models  # takes a second; small_cnn does not need it

    if architecture not in models.list_models(module=models):
        raise UsageError(f"torchvision has no classification model {architecture!r}: see params.architecture")
    try:
        model: nn.Module = models.get_model(
            architecture, weights=None, num_classes=n_outputs, **model_config.get("options", {})
        )
    except (AssertionError, ValueError) as error:
        raise wrong_size(model_config, error) from None
    return model


def wrong_size(model_config: Mapping[str, Any], error: Exception) -> UsageError:
    """Return the error for images that are too small for a model, or of a size that it can't divide."""
    size = model_config["image_size"]
    return UsageError(
        f"{model_config['architecture']} can't take images of {size} x {size} pixels: {str(error).rstrip('.')}; "
        "set params.image_size to the size that the model was made for, usually 224"
    )


def _options(architecture: str, image_size: int) -> dict[str, Any]:
    """Return arguments of torchvision's builder: transformers have a fixed image size.

    The Inceptions are built without auxiliary heads: these need large images, and help little with BatchNorm.
    """
    if architecture.startswith("vit_"):
        return {"image_size": image_size}
    if architecture.startswith("maxvit_"):
        return {"input_size": [image_size, image_size]}
    if architecture in _WITH_AUXILIARY_HEADS:
        # Their weights expect pixels from -1 to 1; with this they convert pixels normalised for ImageNet.
        return {"aux_logits": False, "init_weights": True, "transform_input": True}
    return {}


class PixelNormalizer(nn.Module):
    """Converts bytes to model input: [n, 3, h, w], 0 to 255, to float32 with mean 0 and standard deviation 1.

    It has no weights and is not part of the model; the model description has its numbers.
    """

    def __init__(self, model_config: Mapping[str, Any], device: torch.device, *, channels_last: bool = False) -> None:
        super().__init__()
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._scale = _per_channel([1 / (255 * std) for std in model_config["std"]], device)
        self._shift = _per_channel(
            [-mean / std for mean, std in zip(model_config["mean"], model_config["std"], strict=True)], device
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the converted images, on the device."""
        moved = images.to(self._scale.device, non_blocking=True)
        return torch.addcmul(self._shift, moved.float(), self._scale).contiguous(memory_format=self._format)


def _per_channel(numbers: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


# --- the model of a checkpoint ---

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


def answer_names(model_config: Mapping[str, Any]) -> list[str]:
    """The name of each output of a model: that of the data's class, if it has one, else the label of the weights."""
    names = list(model_config["output_names"])
    for name, output in zip(model_config["classes"], model_config["outputs"], strict=True):
        names[output] = name
    return names
