"""The weights of a checkpoint as torch tensors: of one file, of several, or of the slices of ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ddptrain.protocol.tensor_slices import SavedTensor, saved_model

MODEL_FILE = "model.safetensors"
# safetensors' names of types: https://huggingface.co/docs/safetensors
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


def read_weights(folder: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Load the weights of a checkpoint by name; shared weights have all of their names. No pickle is executed.

    Raises SlicesError if a slice of a sharded model is missing; OSError and SafetensorError if files can't be read.
    """
    if not (folder / MODEL_FILE).is_file():
        saved, tied = saved_model(folder)
        weights = {name: tensor_of(tensor).to(device) for name, tensor in saved.items()}
    else:
        weights = load_file(folder / MODEL_FILE, device=str(device))
        with safe_open(folder / MODEL_FILE, framework="pt") as file:
            tied = file.metadata() or {}
    return weights | {name: weights[kept] for name, kept in tied.items() if kept in weights}


def tensor_of(saved: SavedTensor, offset: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
    """Read a saved tensor, or the part of `size` at `offset`, on the CPU. Raises SlicesError, OSError."""
    items = saved.read(offset, size)
    octets = torch.from_numpy(items.reshape(-1).view(np.uint8)) if items.size else torch.empty(0, dtype=torch.uint8)
    return octets.view(_TYPES[saved.dtype]).reshape(items.shape)


def with_module_versions(model: torch.nn.Module, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The weights as load_state_dict needs them: with the versions of the model's modules, which files do not contain.

    Without them a module assumes its first version; some, such as torchvision's MNASNet, refuse that.
    """
    state = OrderedDict(weights)
    if versions := getattr(model.state_dict(), "_metadata", None):
        vars(state)["_metadata"] = versions
    return state
