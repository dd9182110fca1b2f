"""The random states of a rank: taken as plain data, put back, or made anew for another rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's states, as tensors and numbers that load without executing a pickle."""
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = of_numpy
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where `state` was captured; a device that it knows nothing of keeps its own."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed(state: Mapping[str, Any], rank: int) -> None:
    """States for a rank that there was not: the same for the same saved `state` and rank, another for each rank."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:7], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
