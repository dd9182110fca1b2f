"""Seconds for new names from a run: with the library's function, or in the tutorial's way, one name after the other.

The tutorial's loop reads the last 8 symbols of the name so far anew for each character; for a model with full context
it reads the whole name so far anew. Both drop known and repeated names, as the library does by default.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from ddptrain.workloads.petnames.alphabet import BLANK, STOP, SYMBOLS
from ddptrain.workloads.petnames.generate import generate_names, known_names, load_model
from ddptrain.workloads.petnames.model import CharacterModel

LONGEST = 64


def tutorial_name(model: CharacterModel, window: int | None) -> str:
    """One name, character by character; `window` None reads all of it each time."""
    name = ""
    while len(name) < LONGEST:
        seen = BLANK + name if window is None else (BLANK * window + name)[-window:]
        numbers = torch.tensor([[SYMBOLS.index(symbol) for symbol in seen]])
        hidden, _ = model.lstm(functional.one_hot(numbers, len(SYMBOLS)).float())
        chances = functional.softmax(model.linear(hidden[:, -1]), dim=1).numpy().astype("float64")[0]
        symbol = SYMBOLS[np.random.choice(len(SYMBOLS), p=chances / chances.sum())]
        if symbol == STOP:
            break
        name += symbol
    return name


def one_by_one(run_dir: Path, count: int) -> list[str]:
    """`count` names that the run's list does not hold."""
    model, _ = load_model(run_dir)
    known = known_names(run_dir)
    window = model.config.window if model.config.context == "window" else None
    names: list[str] = []
    with torch.no_grad():
        while len(names) < count:
            name = tutorial_name(model, window)
            if name and name not in known and name not in names:
                names.append(name)
    return names


def main(run_dir: str, count: int, way: str) -> None:
    """Prints the names made and the seconds they took, with torch imported already."""
    np.random.seed(0)
    began = time.perf_counter()
    if way == "library":
        names = list(generate_names(Path(run_dir), count, seed=0).names)
    else:
        names = one_by_one(Path(run_dir), count)
    print(json.dumps({"names": len(names), "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
