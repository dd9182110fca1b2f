"""The states of a rank's random number generators: captured as plain data, restored, or derived for a new rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddptrain.file_ops import sha256


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of Python, NumPy and torch, as tensors and numbers that load without executing a pickle."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a captured state; the state of a GPU stays if none was captured."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed(state: Mapping[str, Any], rank: int) -> None:
    """Set random states that depend only on `state` and the rank, for a checkpoint without the state of this rank."""
    digest = sha256(state["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:7], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
