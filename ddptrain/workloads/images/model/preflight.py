"""Files that the parameters name besides the images: looked at before anything starts, as far as that can be."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import shown
from ddptrain.errors import UsageError
from ddptrain.storage.base import fetch
from ddptrain.storage.remote_folder import is_url
from ddptrain.workloads.images.model.catalogue import N_OUTPUTS
from ddptrain.workloads.images.model.label_file import read_labels
from ddptrain.workloads.images.model.labels import Labels, match
from ddptrain.workloads.images.params import WEIGHTS_NAME

if TYPE_CHECKING:
    from ddptrain.workloads.images.params import ImagesParams

_HERE = "file://"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # what torch.save writes, and what it wrote before torch 1.6


class BadWeights(UsageError):
    """Weights that can't be had, read, or loaded into the model."""


class WeightsNotReached(BadWeights):
    """Weights that this host could not get, which others may."""


def is_weights_name(weights: str) -> bool:
    """Whether it is a name of torchvision's, as DEFAULT, not a path or a URL."""
    return WEIGHTS_NAME.fullmatch(weights) is not None


def is_weights_url(weights: str) -> bool:
    """Whether it is a URL of what has to be fetched first."""
    return is_url(weights) and not weights.startswith(_HERE)


def check_weights(params: ImagesParams) -> None:
    """Pass where params.weights is no path, or that of a file which looks as one with weights does.

    Raises: BadWeights.
    """
    if params.weights is not None and not is_weights_url(params.weights) and not is_weights_name(params.weights):
        weights_path(params.weights)


def weights_path(weights: str) -> Path:
    """The path of a file with weights. Raises: BadWeights."""
    path = Path(weights.removeprefix(_HERE)).expanduser()
    check_weights_file(path, shown(str(path.absolute()), 300))
    return path


def check_weights_file(path: Path, where: str) -> None:
    """Pass where a file, called `where` in errors, looks as one with weights does. Raises: BadWeights."""
    if path.is_dir():
        raise BadWeights(f"{where} is a folder: name the file in it, as model.safetensors, as params.weights")
    if not path.exists():
        raise BadWeights(
            f"there are no weights {where}: params.weights is the path of a file that the command and every rank see, "
            "or a URL"
        )
    try:
        with path.open("rb") as file:
            first = file.read(9)
        whole = _is_whole(path, first)
    except OSError as error:
        raise BadWeights(f"can't read the weights {where}: {error.strerror or error}") from None
    if not (is_safetensors(first) or first.startswith((_ZIP, _PICKLE))):
        what = "is empty" if not first else f"begins with {first!r}"
        raise BadWeights(
            f"{where} holds no weights: it {what}; params.weights is a file of safetensors, or what "
            "torch.save(model.state_dict(), FILE) has written"
        )
    if not whole:
        raise BadWeights(
            f"the weights {where} are not whole: the file has {path.stat().st_size:,} bytes; fetch it again"
        )


def _is_whole(path: Path, first: bytes) -> bool:
    """False where a file is certain to be cut short: its end says so, or its head says more than there is."""
    if first.startswith(_ZIP):
        return zipfile.is_zipfile(path)
    return not is_safetensors(first) or 8 + int.from_bytes(first[:8], "little") <= path.stat().st_size


def is_safetensors(first: bytes) -> bool:
    """Whether a file begins so: eight bytes of a length, then JSON. A zip file or a pickle begins otherwise."""
    return first[8:9] == b"{"


def labels_of(params: ImagesParams) -> Labels | None:
    """What params.label_map holds, if it is given. Raises: UsageError, also where it is not of the weights named."""
    if params.label_map is None:
        return None
    where = params.label_map
    read = (lambda url: fetch(url, options_for(params, url))) if is_url(where) else None
    n_outputs = N_OUTPUTS if params.weights is not None and is_weights_name(params.weights) else None
    return read_labels(where, read, n_outputs)


def checked_labels(params: ImagesParams, classes: Sequence[str]) -> Labels | None:
    """What params.label_map holds, if it is given: it names every class for certain. Raises: UsageError."""
    labels = labels_of(params)
    if labels is not None:
        match(classes, labels)
    return labels


def options_for(params: ImagesParams, url: str) -> dict[str, Any]:
    """The options of the source go for what lies in the same kind of store."""
    same = url.partition("://")[0].lower() == params.source.partition("://")[0].lower()
    return dict(params.source_options) if same else {}
