"""The model at the start of a run: its description, its initial weights, and a check that the two fit."""

from __future__ import annotations

import glob
import http.client
import os
import re
import secrets
import time
import urllib.error
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddptrain import file_ops
from ddptrain.config.wording import did_you_mean, listed, shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.log import Log
from ddptrain.protocol.rank_spec import StartingWeights, names_model, weights_in
from ddptrain.rank.checkpoint.weights import with_module_versions
from ddptrain.workloads.images.model.build_model import MEAN, STD, build, describe, outline, wrong_size
from ddptrain.workloads.images.model.labels import Labels, outputs_of
from ddptrain.workloads.images.model.preflight import (
    BadWeights,
    is_safetensors,
    is_weights_name,
    labels_of,
    weights_path,
)
from ddptrain.workloads.images.params import ImagesParams

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext


_log = Log(__name__)
_TRIES = 3
_TIMEOUT_S = 30.0  # without a byte
_PAUSE_S = 1.0  # after the first failure; more after the next
_POLL_S = 0.2
_ABANDONED_S = 3600.0  # without a byte: no process writes to the file any more
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 32 << 30  # weights of image classifiers are smaller: a larger file is another one, or never ends
_DEADLINE_S = 4 * 3600.0  # for all attempts together; a server that sends single bytes would never time out
_TRANSIENT_STATUS = {407, 408, 425, 429}  # of a proxy, or a busy server
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.")

Progress = Callable[[float, float | None], None]  # megabytes done, and the total if it is known
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


def described_model(settings: ImagesParams, classes: Sequence[str]) -> dict[str, Any]:
    """Return the description of the model that the parameters select; see build_model.describe.

    Raises: UsageError if the label map is unreadable, ambiguous or of another model; BadWeights for an unknown name.
    """
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    if settings.weights is not None and is_weights_name(settings.weights):
        known = find_pretrained(settings.architecture, settings.weights)
        mean, std = known.mean, known.std
    labels = labels_of(settings)
    if labels is None:
        return describe(settings.architecture, settings.image_size, classes, mean=mean, std=std)
    return describe(
        settings.architecture,
        settings.image_size,
        classes,
        outputs=outputs_of(classes, labels),
        output_names=labels.names,
        mean=mean,
        std=std,
    )


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
    if settings.weights is None:
        return
    path = weights_file(
        settings.architecture, settings.weights, ctx.inputs, lambda done, total: ctx.progress(done, total, unit="MB")
    )
    keep_head = settings.label_map is not None
    # Torchvision's weights have other classes even if their number is equal; a user's own weights may have the same.
    other_classes = is_weights_name(settings.weights) or _has_other_classes(settings, model_config, ctx.inputs)
    new_head = not keep_head and other_classes
    fitting, others = fit(model, read(path), model_config, str(path), keep_head=keep_head, new_head=new_head)
    model.load_state_dict(with_module_versions(model, fitting), strict=False)
    if ctx.rank == 0:
        source = settings.weights if names_model(settings.weights) else path
        print(f"weights: {source}{_replaced(others, model_config['n_outputs'])}", flush=True)
        _tell_size(settings, settings.weights)


def _has_other_classes(settings: ImagesParams, model_config: Mapping[str, Any], inputs: Path | None) -> bool:
    """Return whether the weights are of a model of the registry that was trained on other classes."""
    if inputs is None or not names_model(settings.weights):
        return False
    known = StartingWeights.read(inputs)
    return known is not None and bool(known.classes) and list(known.classes) != list(model_config["classes"])


def _replaced(others: int | None, n_outputs: int) -> str:
    if others is None:
        return ""
    hint = " (params.label_map keeps it)" if others == n_outputs else ""
    return f"; their head of {others:,} outputs is replaced by a new one of {n_outputs:,}{hint}"


def _tell_size(settings: ImagesParams, weights: str) -> None:
    """Print a line if the weights were trained with another image size."""
    size = (
        find_pretrained(settings.architecture, weights).image_size if is_weights_name(weights) else settings.image_size
    )
    if size != settings.image_size:
        text = f"these weights were made for images of {size} pixels, params.image_size is {settings.image_size}"
        print(text, flush=True)


def weights_file(architecture: str, weights: str, inputs: Path | None, progress: Progress) -> Path:
    """Return the local file with the weights: a path, a model of the registry in `inputs`, or torchvision's, fetched.

    Raises BadWeights; UsageError if the weights of a model are missing.
    """
    if names_model(weights):
        return weights_in(inputs)
    if not is_weights_name(weights):
        return weights_path(weights)
    url = find_pretrained(architecture, weights).url
    path = Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(url).name  # the folder that torchvision uses
    try:
        return fetch_file(url, path, progress=progress, tell=lambda line: print(line, flush=True))
    except DownloadFailed as error:
        raise BadWeights(
            f"the weights {weights} of {architecture} can't be fetched: {error}; fetch the file elsewhere and name it, "
            "as params.weights: FILE, or set params.weights: null for random ones"
        ) from None


def check_weights_fit(
    settings: ImagesParams, weights: str, classes: Sequence[str], labels: Labels | None, inputs: Path
) -> None:
    """Check that weights, a path or a model of the registry, fit the model.

    Raises: BadWeights; UsageError if the model does not support the image size.
    """
    path = weights_in(inputs) if names_model(weights) else weights_path(weights)
    source = weights if names_model(weights) else shorten(str(path.absolute()), 300)
    names = None if labels is None else labels.names
    model_config = describe(settings.architecture, settings.image_size, classes, output_names=names)
    fit(outline(model_config), read(path, source, lazily=True), model_config, source, keep_head=labels is not None)


class DownloadFailed(UsageError):
    """A file can't be downloaded from its URL."""


def fetch_file(url: str, path: Path, *, progress: Progress, tell: Callable[[str], None]) -> Path:
    """Download an http or https URL to `path`, unless it exists; return `path`. At most 32 GiB, within 4 hours.

    If several processes of this host call this, one downloads and the others wait; `progress` is called meanwhile.
    The content's SHA-256 must begin as the name says, as in resnet50-11ad3fa6.pth.

    Raises DownloadFailed.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock"), progress):
            if not path.exists():
                _delete_abandoned(path)
                tell(f"fetching {url} to {path}")
                digest = _HASH_IN_NAME.search(path.name)
                _download(url, path, progress, digest[1] if digest else "")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadFailed(f"can't fetch {url} to {path}: {_reason(error)}") from None
    return path


@contextmanager
def _locked(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file for the block; a process that waits reports progress, so that it does not count as hung."""
    descriptor = file_ops.open_regular(lock, file_ops.CREATE)  # others must not hold it, for which reading is enough
    try:
        while not file_ops.try_lock(descriptor):
            progress(0, None)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _download(url: str, path: Path, progress: Progress, digest: str) -> None:
    """Write a temporary file, check its hash, and rename it."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        for attempt in range(1, _TRIES + 1):
            try:
                digest_found = _write(url, beside, progress, deadline)
                break
            except (OSError, ValueError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it is an answer, with a connection
                if attempt == _TRIES or _is_final(error):
                    raise
                beside.unlink(missing_ok=True)
                _log.info("download failed, trying again", url=url, attempt=attempt, error=error)
                time.sleep(attempt * _PAUSE_S)
        if not digest_found.startswith(digest):
            raise DownloadFailed(f"{url} is damaged: its SHA-256 is {digest_found[:16]}..., not {digest}...")
        file_ops.publish(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _delete_abandoned(path: Path) -> None:
    """Delete temporary files of processes that were killed; those of another host that still writes are newer."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()


def _write(url: str, beside: Path, progress: Progress, deadline: float) -> str:
    """Write the URL's content into a file; return its SHA-256 in hex."""
    digest, done = file_ops.sha256(), 0
    with os.fdopen(file_ops.open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        for chunk, total in _http_chunks(url):
            digest.update(chunk)
            file.write(chunk)
            done += len(chunk)
            _refuse_too_large(url, done)
            progress(done / 1e6, total / 1e6 if total else None)
            if time.monotonic() > deadline:
                raise DownloadFailed(
                    f"can't fetch {url}: after {_DEADLINE_S:g} s there are {done:,} bytes of "
                    f"{f'{total:,}' if total else 'an unknown number'}: is the server too slow?"
                )
    return digest.hexdigest()


def _http_chunks(url: str) -> Iterator[tuple[bytes, int]]:
    """Yield pieces of the content, each with the total size in bytes, or 0 if it is not known."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        total, done = answer.length or 0, 0
        _refuse_too_large(url, total)
        while chunk := answer.read1(_CHUNK_BYTES):  # read() would wait for the complete chunk
            yield chunk, total
            done += len(chunk)
    if total and done != total:
        raise ConnectionError(f"it ended after {done:,} of {total:,} bytes")


def _refuse_too_large(url: str, size_bytes: int) -> None:
    if size_bytes > _MOST_BYTES:
        raise DownloadFailed(f"can't fetch {url}: it has more than {_MOST_BYTES:,} bytes; is it the right file?")


def _is_final(error: Exception) -> bool:
    """Return whether a server has refused the request, or has no such file, or it is not a URL."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500 and error.code not in _TRANSIENT_STATUS
    return isinstance(error, ValueError | http.client.InvalidURL)  # it is not a URL


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {' '.join(str(error.reason).split())}"
    return str(getattr(error, "reason", "") or error)


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
