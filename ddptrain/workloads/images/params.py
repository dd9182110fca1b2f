"""The parameters of the image workload."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ddptrain.config.types import FilledText, wrong_field
from ddptrain.config.wording import describe_value, did_you_mean, nearest
from ddptrain.storage.store import BUILTIN

WEIGHTS_NAME = re.compile(r"[A-Z][A-Z0-9_]*")  # as DEFAULT, IMAGENET1K_V1; or a path, or a model of the registry
SMALL_CNN = "small_cnn"  # our own model
N_OUTPUTS = 1000  # of all classification weights in torchvision: the classes of ImageNet
_BUILDER = re.compile(
    r"^@register_model\(\)\n(?:@.*\n)*def (?P<name>\w+)\([^)]*?weights: (?:Optional\[)?(?P<weights>\w+)", re.MULTILINE
)
_WEIGHTS = re.compile(r"^class (?P<name>\w+)\(WeightsEnum\):\n(?P<body>(?:[ \t].*\n|\n)+)", re.MULTILINE)
_MEMBER = re.compile(r"^    ([A-Z][A-Z0-9_]*) = ", re.MULTILINE)


class CacheParams(BaseModel):
    """The cache of images on each host, so that the next epoch or run does not download them again."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    dir: FilledText | None = Field(None, description="Folder of the cache; null is one in the user's cache folder.")
    max_gb: float = Field(20.0, gt=0.0, le=1e6, description="Gigabytes that the cache may take; the oldest go first.")


class ImagesParams(BaseModel):
    """The parameters of `workload: images`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    source: FilledText = Field(
        BUILTIN,
        description="Where images come from, as CLASS/IMAGE below it: a folder, a URL (s3://, gs://, az://, https://), "
        "or builtin: a few hundred small drawings; or split, as train/CLASS/IMAGE and val/CLASS/IMAGE.",
    )
    source_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the store of `source` as obstore names them, or fsspec for "
        "other protocols, such as {skip_signature: true, endpoint: ...} for S3.",
    )
    subset: Annotated[int, Field(ge=1)] | Annotated[list[FilledText], Field(min_length=1)] | None = Field(
        None, description="Classes to use: their names, or how many of them, the first ones in order; null is all."
    )
    train_pct: float = Field(
        0.8,
        gt=0.0,
        le=1.0,
        description="Share of each class to train on; the rest is for validation. 1.0 validates nothing. "
        "Not used with a split source.",
    )
    image_size: int = Field(224, ge=8, le=2048, description="Width and height, in pixels, of what the model sees.")
    augmentation: Literal["none", "flip", "crop"] = Field(
        "crop", description="What training does to images: flips half of them; crop takes random parts as well."
    )

    architecture: FilledText = Field(
        "resnet50", description="Any classification model of torchvision by its name, or small_cnn for small images."
    )
    weights: FilledText | None = Field(
        None,
        description="Initial weights: DEFAULT or another name that torchvision has for the architecture, "
        "the path of a file of safetensors or a state dict, or a model of the registry, as model:dogs@champion; null "
        "starts with random weights.",
    )
    label_map: FilledText | None = Field(
        None,
        description='Path of a JSON file with the label of each output of the weights, as {"0": "tench"} or, with '
        'WordNet ids, {"0": ["n01440764", "tench"]}: the head is kept, and a folder is the output with its id or name; '
        "null replaces the head by one for the data's classes.",
    )

    epochs: int = Field(6, ge=1, description="Epochs; in each, all ranks together see every image once.")
    batch_size: int = Field(64, ge=1, le=65536, description="Images in a batch of a rank.")
    optimizer: Literal["adamw", "adam", "sgd"] = Field("adamw", description="The optimizer.")
    base_lr: float = Field(3e-4, gt=0.0, le=10.0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0.0, le=10.0, description="Weight decay of the optimizer.")
    scheduler: Literal["one_cycle", "cosine", "plateau", "none"] = Field(
        "one_cycle",
        description="Learning rate over the run: up and down; down; a tenth after 3 epochs without a better val/loss; "
        "or constant.",
    )

    loader_workers: Literal["auto"] | Annotated[int, Field(ge=0, le=256)] = Field(
        "auto", description="Workers of a rank that read and decode images; 0 does it in the rank itself."
    )
    requests: int = Field(64, ge=1, le=1024, description="Requests of a rank to the store at the same time.")
    cache: CacheParams | None = Field(None, description="Keep images on the hosts; null keeps none.")
    max_bad_fraction: float = Field(
        0.01, ge=0.0, le=1.0, description="Share of images that may be missing or damaged before the run fails."
    )

    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the split, the weights, the order and the augmentation.")

    @model_validator(mode="after")
    def _architecture_is_known(self) -> Self:
        known = architectures()
        if known and self.architecture not in known:
            hint = did_you_mean(self.architecture, known)
            if nearest(self.architecture, known) is None:
                hint = "torchvision's names are such as resnet50, convnext_tiny, vit_b_16; ours is small_cnn"
            raise wrong_field("architecture", f"there is no such model, got {describe_value(self.architecture)}", hint)
        return self

    @model_validator(mode="after")
    def _weights_are_known(self) -> Self:
        if self.weights is not None and "://" in self.weights:
            message = "a URL is not read: expected a name of torchvision's weights, a path, or model:NAME@ALIAS"
            raise wrong_field("weights", message, "download the file, and give its path")
        if self.weights is None or not WEIGHTS_NAME.fullmatch(self.weights):
            return self
        if self.architecture == SMALL_CNN:
            message, hint = f"{SMALL_CNN} has no weights named {self.weights}", "give a file of your own, or null"
            raise wrong_field("weights", message, hint)
        known = weight_names(self.architecture)
        if known and self.weights not in known:
            message = f"{self.architecture} has no such weights, got {describe_value(self.weights)}"
            raise wrong_field("weights", message, did_you_mean(self.weights, known))
        return self

    @model_validator(mode="after")
    def _label_map_has_weights_to_name(self) -> Self:
        if self.label_map is not None and self.weights is None:
            raise wrong_field(
                "label_map",
                "names the outputs of params.weights, which are not set",
                "give weights, as DEFAULT, or leave label_map out",
            )
        return self


def architectures() -> list[str]:
    """Return the names of all classification models; an empty list if torchvision is not installed."""
    names = sorted(match["name"] for text in _sources() for match in _BUILDER.finditer(text))
    return [SMALL_CNN, *names] if names else []


def weight_names(architecture: str) -> list[str]:
    """Return the names of torchvision's weights for a model, as DEFAULT and IMAGENET1K_V1; empty if unknown."""
    for text in _sources():
        kinds = {match["name"]: match["weights"] for match in _BUILDER.finditer(text)}
        bodies = {match["name"]: match["body"] for match in _WEIGHTS.finditer(text)}
        if architecture in kinds:
            return sorted(set(_MEMBER.findall(bodies.get(kinds[architecture], ""))))
    return []


def _sources() -> Iterator[str]:
    spec = find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parent / "models").glob("*.py")):
            yield path.read_text(encoding="utf-8")
