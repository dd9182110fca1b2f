"""Checks the weights file and the label map before the run starts; torch-free."""

from __future__ import annotations

import zipfile
from pathlib import Path

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.protocol.rank_spec import names_model
from ddptrain.workloads.images.model.labels import Labels, read_labels
from ddptrain.workloads.images.params import N_OUTPUTS, WEIGHTS_NAME, ImagesParams

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # formats of torch.save, since 1.6 and before


class BadWeights(UsageError):
    """Weights that can't be fetched, read, or loaded into the model."""


def is_weights_name(weights: str) -> bool:
    """Return whether it is a name of torchvision's weights, as DEFAULT, not a path."""
    return WEIGHTS_NAME.fullmatch(weights) is not None


def check_weights(params: ImagesParams) -> None:
    """Check the weights file if params.weights is a path. Raises BadWeights."""
    weights = params.weights
    if weights is None or is_weights_name(weights) or names_model(weights):
        return
    weights_path(weights)


def weights_path(weights: str) -> Path:
    """Return the path of a weights file that looks valid. Raises BadWeights."""
    path = Path(weights).expanduser()
    where = shorten(str(path.absolute()), 300)
    if path.is_dir():
        raise BadWeights(f"{where} is a folder: name the file in it, as model.safetensors, as params.weights")
    if not path.exists():
        raise BadWeights(
            f"there are no weights {where}: params.weights is the path of a file that the command and all ranks can "
            "read"
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
            f"the weights {where} are incomplete: the file has {path.stat().st_size:,} bytes; download it again"
        )
    return path


def _is_whole(path: Path, first: bytes) -> bool:
    """Return False if a file is certainly truncated: a zip file without its end, or a header that exceeds the file."""
    if first.startswith(_ZIP):
        return zipfile.is_zipfile(path)
    return not is_safetensors(first) or 8 + int.from_bytes(first[:8], "little") <= path.stat().st_size


def is_safetensors(first: bytes) -> bool:
    """Return whether a file begins as safetensors: eight bytes of a length, then JSON. Zip files and pickles do not."""
    return first[8:9] == b"{"


def labels_of(params: ImagesParams) -> Labels | None:
    """The labels in params.label_map, if set. Raises UsageError, also if their number is not that of the weights."""
    if params.label_map is None:
        return None
    n_outputs = N_OUTPUTS if params.weights is not None and is_weights_name(params.weights) else None
    return read_labels(Path(params.label_map).expanduser(), n_outputs)
