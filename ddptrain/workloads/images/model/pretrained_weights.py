"""Weights files: finds torchvision's, reads files without executing pickles, loads weights into a model."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddptrain.config.wording import did_you_mean, listed, shorten
from ddptrain.errors import one_line
from ddptrain.workloads.images.model.build_model import outline
from ddptrain.workloads.images.model.preflight import BadWeights, is_safetensors

_WRAPPERS = ("state_dict", "model_state_dict", "model", "state")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
# In torchvision's files of DenseNet: module names such as 'norm.1' are no longer allowed.
_OLD_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
# In its files of vision transformers: layers of the perceptrons had names (torchvision's pull request 6053).
_OLD_PERCEPTRON = re.compile(r"(.*encoder_layer_\d+\.mlp\.)linear_([12])(\..*)")
_LAYER_OF = {"1": "0", "2": "3"}
_MOST_NAMED = 5
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # in error messages of torch


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """Weights of torchvision: their URL, and the images that they were trained with.

    mean, std: of the normalisation, per channel. image_size: width and height in pixels.
    """

    url: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int


def find_pretrained(architecture: str, name: str) -> PretrainedWeights:
    """Return torchvision's weights of that name. Raises BadWeights if there are none."""
    from torchvision import models

    kinds = models.get_model_weights(architecture)
    if name not in kinds.__members__:
        hint = did_you_mean(name, list(kinds.__members__))
        raise BadWeights(f"{architecture} has no weights {name!r} ({hint}): see params.weights")
    weights = kinds[name]
    shows = weights.transforms()
    return PretrainedWeights(weights.url, tuple(shows.mean), tuple(shows.std), max(shows.crop_size))


def read(path: Path, source: str = "", *, lazily: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a state dict written by torch.save; nothing is executed.

    source: the name of the file in messages. lazily: leave the content of the tensors on disk, if possible.

    Raises BadWeights.
    """
    source = source or str(path)
    try:
        with path.open("rb") as file:
            first = file.read(9)
        found: Any = load_file(path) if is_safetensors(first) else _saved(path, lazily=lazily)
    except UnpicklingError as error:
        raise BadWeights(
            f"{source} is not loaded, because it contains more than tensors, which may run code{_forbidden(error)}; "
            "save its tensors with safetensors, or with torch.save(model.state_dict(), FILE)"
        ) from error
    except Exception as error:  # damaged files raise arbitrary errors
        raise BadWeights(
            f"can't read the weights {source}: {shorten(one_line(error), 200)}; is the file complete?"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    tensors = found.items() if isinstance(found, Mapping) else ()
    state = {_plain(str(name)): value for name, value in tensors if isinstance(value, Tensor)}
    if not state:
        raise BadWeights(f"{source} contains no weights: expected a state dict, a tensor for each name")
    return state


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

    A head of another size is left out, which `keep_head` makes an error; `new_head` leaves out any head. Only names and
    shapes of the model are used. Raises BadWeights if the weights are of another model.
    """
    own = model.state_dict()
    state = _fitted(state, own, model_config)
    wrong = [name for name, value in own.items() if name in state and state[name].shape != value.shape]
    if new_head and not wrong:
        wrong = [name for name in _head(own, model_config) if name in state]
    others = _head_outputs(wrong, state, own, model_config["n_outputs"])
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected or (wrong and others is None):
        misfits = [] if others else [f"{name} ({_shape(state[name])}, not {_shape(own[name])})" for name in wrong]
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
    return {name: value for name, value in state.items() if name not in wrong}, others


def _saved(path: Path, *, lazily: bool) -> Any:
    mmap = lazily and zipfile.is_zipfile(path)  # impossible for the format before torch 1.6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about pickle versions; real problems raise errors
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _fitted(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], model_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The weights under current names, without auxiliary heads, with a ViT's positions resized for the image size."""
    fitted = {
        _named_now(name): value
        for name, value in state.items()
        if not (model_config["options"].get("aux_logits") is False and name.startswith(_AUXILIARY))
    }
    places, patches = "encoder.pos_embedding", "conv_proj.weight"
    if places in own and places in fitted and fitted[places].shape[1:2] != own[places].shape[1:2]:
        from torchvision.models.vision_transformer import interpolate_embeddings

        with suppress(ValueError, RuntimeError):  # of images that are not square: reported as another shape
            fitted = interpolate_embeddings(model_config["image_size"], own[patches].shape[-1], fitted)
    return fitted


def _named_now(name: str) -> str:
    name = _OLD_DENSENET.sub(r"\1\2", name)
    return _OLD_PERCEPTRON.sub(lambda found: f"{found[1]}{_LAYER_OF[found[2]]}{found[3]}", name)


def _head(own: Mapping[str, Tensor], model_config: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights whose shape depends on the number of outputs."""
    larger = outline({**model_config, "n_outputs": model_config["n_outputs"] + 1}).state_dict()
    return [name for name, value in own.items() if larger[name].shape != value.shape]


def _head_outputs(
    wrong: Sequence[str], state: Mapping[str, Tensor], own: Mapping[str, Tensor], n_outputs: int
) -> int | None:
    """The number of outputs of the head in `state`, if the weights in `wrong` are that head and differ in it alone."""
    modules = {name.rpartition(".")[0] for name in wrong}
    sizes = {len(state[name]) if state[name].dim() else 0 for name in wrong}
    fits = all(own[name].shape[:1] == (n_outputs,) and own[name].shape[1:] == state[name].shape[1:] for name in wrong)
    return sizes.pop() if wrong and fits and len(modules) == len(sizes) == 1 else None


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _forbidden(error: UnpicklingError) -> str:
    """Return the function that the pickle would have called, as named in torch's long message; "" if it has none."""
    match = _GLOBAL.search(str(error))
    return f": {shorten(match[1], 100)}" if match else ""
