"""Image models, and the plain description from which a checkpoint's model is built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.errors import UsageError
from ddptrain.workloads.images.params import SMALL_CNN

# ImageNet's, per channel: nearly all of torchvision's weights were trained with them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
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


def outline(model_config: Mapping[str, Any]) -> nn.Module:
    """Build the model without memory for its weights, if its architecture allows that. Raises as `build` does."""
    try:
        with torch.device("meta"):
            return build(model_config)
    except NotImplementedError:  # RegNet computes its shapes with tensors
        return build(model_config)


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
