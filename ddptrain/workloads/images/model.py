"""Image models: their description as plain data, initial weights, and the model of a checkpoint."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from safetensors.torch import load_file
from torch import Tensor, nn

from ddptrain import file_ops
from ddptrain.config.wording import did_you_mean, listed, shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.protocol.rank_spec import StartingWeights, names_model, weights_in
from ddptrain.rank.checkpoint.weights import with_module_versions
from ddptrain.workloads.checkpoint import check_workload, checkpoint_folder, load_checkpoint
from ddptrain.workloads.images.listing import labels_of, outputs_of
from ddptrain.workloads.images.params import SMALL_CNN, WEIGHTS_NAME, ImagesParams, architectures

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

Progress = Callable[[float, float | None], None]  # megabytes done, and the total if it is known

_TRIES = 3
_TIMEOUT_S = 30.0  # without a byte
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_TRANSIENT_STATUS = {407, 408, 425, 429}  # of a proxy, or a busy server
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "state")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
_MOST_NAMED = 5
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # in error messages of torch
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


class ModelInput:
    """Converts the bytes of images to the input of a model, and labels to its outputs, on a device.

    Its numbers are those of the model description: mean and standard deviation of the channels, and the outputs.
    """

    def __init__(self, model_config: Mapping[str, Any], device: torch.device, *, channels_last: bool = False) -> None:
        self.device = device
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._scale = _per_channel([1 / (255 * std) for std in model_config["std"]], device)
        means = zip(model_config["mean"], model_config["std"], strict=True)
        self._shift = _per_channel([-mean / std for mean, std in means], device)
        self._outputs = torch.tensor(model_config["outputs"], device=device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return images [n, 3, h, w] with values from 0 to 255 as float32 with mean 0 and standard deviation 1."""
        moved = images.to(self.device, non_blocking=True)
        return torch.addcmul(self._shift, moved.float(), self._scale).contiguous(memory_format=self._format)

    def targets(self, labels: Tensor) -> Tensor:
        """Return the model's output for each label [n], the index of a class."""
        return self._outputs[labels.to(self.device, non_blocking=True)]


def _per_channel(numbers: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


# --- the model of a new run ---


class BadWeights(UsageError):
    """Weights that can't be fetched, read, or loaded into the model."""


def new_model(ctx: RankContext, settings: ImagesParams, classes: Sequence[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model that the parameters select, and its description. A run that is resumed loads no weights.

    Raises UsageError if it can't take images of that size, or the label map or the weights don't fit.
    """
    config = described_model(settings, classes)
    model = built_model(config)
    if ctx.resume_folder is None:
        begin_with_weights(ctx, settings, model, config)
    return model, config


def described_model(settings: ImagesParams, classes: Sequence[str]) -> dict[str, Any]:
    """Return the description of the model that the parameters select; see describe().

    Raises: UsageError if the label map is unreadable, ambiguous or of another model; BadWeights for an unknown name.
    """
    pixels: dict[str, Any] = {"mean": MEAN, "std": STD}
    if _is_name(settings.weights):
        shows = find_pretrained(settings.architecture, str(settings.weights)).transforms()
        pixels = {"mean": tuple(shows.mean), "std": tuple(shows.std)}
    labels = labels_of(settings)
    if labels is not None:
        pixels |= {"outputs": outputs_of(classes, labels), "output_names": labels.names}
    return describe(settings.architecture, settings.image_size, classes, **pixels)


def built_model(model_config: dict[str, Any]) -> nn.Module:
    """Build the model of a description and check it with an image of its size. Raises UsageError if that fails."""
    model = build(model_config)
    size = model_config["image_size"]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise wrong_size(model_config, error) from None
    return model.train()


def begin_with_weights(
    ctx: RankContext, settings: ImagesParams, model: nn.Module, model_config: dict[str, Any]
) -> None:
    """Load params.weights into the model, before DDP gives those of rank 0 to all ranks. Rank 0 prints them.

    Raises BadWeights if they can't be fetched or read, or are of another model.
    """
    weights = settings.weights
    if weights is None:
        return
    if _is_name(weights):
        state = pretrained(settings.architecture, weights, lambda *mb: ctx.progress(*mb, unit="MB"))
    else:
        state = read(_file_of(weights, ctx.inputs))
    keep_head = settings.label_map is not None
    # Torchvision's weights have other classes even if their number is equal; a user's own weights may have the same.
    new_head = not keep_head and (_is_name(weights) or _has_other_classes(weights, model_config, ctx.inputs))
    fitting, others = fit(model, state, model_config, weights, keep_head=keep_head, new_head=new_head)
    model.load_state_dict(with_module_versions(model, fitting), strict=False)
    n_outputs = model_config["n_outputs"]
    hint = " (params.label_map keeps it)" if others == n_outputs else ""
    head = f"; their head of {others:,} outputs is replaced by a new one of {n_outputs:,}{hint}" if others else ""
    ctx.say(f"weights: {weights}{head}")
    size = max(find_pretrained(settings.architecture, weights).transforms().crop_size) if _is_name(weights) else 0
    if size and size != settings.image_size:
        ctx.say(f"these weights were made for images of {size} pixels, params.image_size is {settings.image_size}")


def check_weights_fit(settings: ImagesParams, weights: str, classes: Sequence[str], inputs: Path) -> None:
    """Check before the ranks start that weights, a path or a model of the registry, fit. Raises BadWeights."""
    config = described_model(settings, classes)
    fit(build(config), read(_file_of(weights, inputs)), config, weights, keep_head=settings.label_map is not None)


def _file_of(weights: str, inputs: Path | None) -> Path:
    return weights_in(inputs) if names_model(weights) else Path(weights).expanduser()


def _is_name(weights: str | None) -> bool:
    """Return whether it is a name of torchvision's weights, as DEFAULT, not a path."""
    return weights is not None and WEIGHTS_NAME.fullmatch(weights) is not None


def _has_other_classes(weights: str, model_config: Mapping[str, Any], inputs: Path | None) -> bool:
    """Return whether the weights are of a model of the registry that was trained on other classes."""
    known = StartingWeights.read(inputs) if inputs is not None and names_model(weights) else None
    return known is not None and bool(known.classes) and list(known.classes) != list(model_config["classes"])


# --- torchvision's weights ---


def find_pretrained(architecture: str, name: str) -> Any:
    """Return torchvision's weights of that name. Raises BadWeights if there are none."""
    from torchvision import models

    kinds = models.get_model_weights(architecture)
    if name not in kinds.__members__:
        hint = did_you_mean(name, list(kinds.__members__))
        raise BadWeights(f"{architecture} has no weights {name!r} ({hint}): see params.weights")
    return kinds[name]


def pretrained(architecture: str, name: str, progress: Progress) -> dict[str, Tensor]:
    """Return torchvision's weights as a state dict; its cache is used, and filled once for all processes of a host.

    Raises BadWeights.
    """
    from torchvision import models

    weights = find_pretrained(architecture, name)
    path = Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(weights.url).name  # where torchvision finds it
    try:
        fetch(weights.url, path, progress)
    except (OSError, http.client.HTTPException) as error:
        raise BadWeights(
            f"the weights {name} of {architecture} can't be fetched: {one_line(error)}; put {weights.url} into "
            f"{path.parent}, name another file, as params.weights: FILE, or set params.weights: null for random ones"
        ) from None
    return dict(models.get_model(architecture, weights=weights).state_dict())


def fetch(url: str, path: Path, progress: Progress) -> None:
    """Download a URL to `path`, unless it exists. If several processes call this, one downloads and the others wait.

    The content's SHA-256 must begin as the name says, as in resnet50-11ad3fa6.pth. `progress` is called meanwhile.

    Raises OSError, HTTPException.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = file_ops.open_regular(path.with_name(f".{path.name}.lock"), file_ops.CREATE)
    try:
        while not file_ops.try_lock(lock):
            progress(0, None)
            time.sleep(_POLL_S)
        for tries_left in reversed(range(_TRIES)):
            if path.exists():
                return
            try:
                _download(url, path, progress)
            except (OSError, http.client.HTTPException) as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else 500
                if not tries_left or (code < 500 and code not in _TRANSIENT_STATUS):
                    raise
                time.sleep(_TRIES - tries_left)
    finally:
        os.close(lock)


def _download(url: str, path: Path, progress: Progress) -> None:
    print(f"fetching {url} to {path}", flush=True)
    beside = path.with_name(f".{path.name}.tmp")
    digest, done = file_ops.sha256(), 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, beside.open("wb") as file:
        total = answer.length
        while chunk := answer.read1(_CHUNK_BYTES):  # read() would wait for the complete chunk
            digest.update(chunk)
            file.write(chunk)
            done += len(chunk)
            progress(done / 1e6, total / 1e6 if total else None)
    if total and done != total:
        raise ConnectionError(f"it ended after {done:,} of {total:,} bytes")
    expected = _HASH_IN_NAME.search(path.name)
    if expected and not digest.hexdigest().startswith(expected[1]):
        raise ConnectionError(f"it is damaged: its SHA-256 is {digest.hexdigest()[:16]}..., not {expected[1]}...")
    file_ops.publish(beside, path)


# --- a file of weights ---


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a state dict written by torch.save; nothing is executed.

    Raises BadWeights.
    """
    try:
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"  # after the length of the header
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about pickle versions; real problems raise errors
            found: Any = load_file(path) if is_safetensors else torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        match = _GLOBAL.search(str(error))
        raise BadWeights(
            f"{path} is not loaded, because it contains more than tensors, which may run code"
            f"{f': {shorten(match[1], 100)}' if match else ''}; save its tensors with safetensors, or with "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    except Exception as error:  # damaged files raise arbitrary errors
        raise BadWeights(
            f"can't read the weights {path}: {shorten(one_line(error), 200)}; is the file complete?"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    tensors = found.items() if isinstance(found, Mapping) else ()
    state = {_plain(str(name)): value for name, value in tensors if isinstance(value, Tensor)}
    if not state:
        raise BadWeights(f"{path} contains no weights: expected a state dict, a tensor for each name")
    return state


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def fit(
    model: nn.Module,
    state: Mapping[str, Tensor],
    model_config: Mapping[str, Any],
    source: str,
    *,
    keep_head: bool,
    new_head: bool = False,
) -> tuple[dict[str, Tensor], int | None]:
    """Return the weights to load into the model, and the number of outputs of their head if it is left out, else None.

    A head of another size is left out, which `keep_head` makes an error; `new_head` leaves out any head.

    Raises BadWeights if the weights are of another model.
    """
    own, head = model.state_dict(), _head(model, model_config["n_outputs"])
    state = _without_auxiliary(state, own, model_config)
    of_head = {name for name in own if name in state and name.rpartition(".")[0] == head}
    wrong = {name for name, value in own.items() if name in state and state[name].shape != value.shape}
    others = None
    if (wrong or new_head) and wrong <= of_head and all(state[n].shape[1:] == own[n].shape[1:] for n in of_head):
        others = {len(state[name]) for name in of_head}.pop()
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected or (wrong and others is None):
        misfits = [] if others else [f"{n} ({_shape(state[n])}, not {_shape(own[n])})" for n in own if n in wrong]
        differences = {"missing": missing, "unknown": unexpected, "of another shape": misfits}
        raise BadWeights(
            f"the weights {source} are not of {model_config['architecture']}: "
            + "; ".join(f"{what}: {listed(names, _MOST_NAMED, 80)}" for what, names in differences.items() if names)
            + "; set params.architecture to that of the weights, or params.weights to others, or to null"
        )
    if others is not None and keep_head:
        raise BadWeights(
            f"the weights {source} have {others:,} outputs, but params.label_map names {model_config['n_outputs']:,}: "
            "give the labels of these weights"
        )
    return {name: value for name, value in state.items() if others is None or name not in of_head}, others


def _head(model: nn.Module, n_outputs: int) -> str:
    """Return the name of the last layer with an output for each class."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return [str(name) for name, layer in layers if len(layer.weight) == n_outputs][-1]


def _without_auxiliary(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], model_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The weights without auxiliary heads, with a vision transformer's positions resized for the image size."""
    has_none = model_config["options"].get("aux_logits") is False
    fitted = {name: value for name, value in state.items() if not (has_none and name.startswith(_AUXILIARY))}
    places, patches = "encoder.pos_embedding", "conv_proj.weight"
    if places in own and places in fitted and fitted[places].shape[1:2] != own[places].shape[1:2]:
        from torchvision.models.vision_transformer import interpolate_embeddings

        with suppress(ValueError, RuntimeError):  # of images that are not square: reported as another shape
            return dict(interpolate_embeddings(model_config["image_size"], own[patches].shape[-1], fitted))
    return fitted


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


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
