"""The initial weights of a run from a model of the registry; the driver copies them into the inputs of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ddptrain.errors import UsageError
from ddptrain.file_ops import write_atomic
from ddptrain.protocol.typed_json import JsonMessage

PARAM = "weights"  # a parameter of the built-in workloads
PREFIX = "model:"  # the prefix of the parameter's value: model:dogs@champion
FILE = "weights.safetensors"
_RECORD = "weights.json"


@dataclass(frozen=True, slots=True)
class StartingWeights(JsonMessage):
    """The version whose weights are in FILE, the SHA-256 of the file, and the classes of the version, if known."""

    model: str
    version: int
    sha256: str
    classes: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The value of the param that names this version."""
        return f"{PREFIX}{self.model}@{self.version}"

    def write(self, folder: Path) -> None:
        """Write the record into a folder. Raises OSError."""
        write_atomic(folder / _RECORD, f"{self.to_json()}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the record of a folder; None if there is none, or it is damaged."""
        try:
            return cls.from_json((folder / _RECORD).read_bytes())
        except (OSError, ValueError):
            return None


def names_model(weights: object) -> bool:
    """Return whether the value of a param names a model of the registry."""
    return isinstance(weights, str) and weights.startswith(PREFIX)


def weights_in(inputs: Path | None) -> Path:
    """Return the file with the weights in the inputs of a run. Raises UsageError if there is none."""
    if inputs is None or not (inputs / FILE).is_file():
        raise UsageError(
            f"params.{PARAM}: the weights of the model are missing in the run's inputs: start the run with "
            "`ddptrain train`, which fetches them"
        )
    return inputs / FILE


def same_model(before: object, now: object) -> bool:
    """Return whether `now` is an alias of the model whose version number a run has recorded in `before`."""
    if not (isinstance(before, str) and isinstance(now, str) and names_model(before) and names_model(now)):
        return False
    model, _, number = before.partition("@")
    other, _, alias = now.partition("@")
    return model == other and number.isdecimal() and not alias.isdecimal()


def with_weights(params: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Return the params with other weights."""
    return {**params, PARAM: reference}
