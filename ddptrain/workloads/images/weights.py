"""The model at the start of a run: its description, and initial weights, which may be of other classes."""

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
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddptrain import file_ops
from ddptrain.config.wording import did_you_mean, listed, shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.protocol.rank_spec import StartingWeights, names_model, weights_in
from ddptrain.rank.checkpoint.weights import with_module_versions
from ddptrain.workloads.images.classifier import MEAN, STD, build, describe, wrong_size
from ddptrain.workloads.images.listing import labels_of, outputs_of
from ddptrain.workloads.images.params import WEIGHTS_NAME, ImagesParams

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


class BadWeights(UsageError):
    """Weights that can't be fetched, read, or loaded into the model."""


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
