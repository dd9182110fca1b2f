"""Writes the weights of a version of a model into a folder that works without ddptrain."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file, publish
from ddptrain.workloads.checkpoint import checkpoint_folder
from ddptrain.workloads.petnames.names import BLANK, STOP, SYMBOLS

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
_BATCH = "batch"
_NAME_SYMBOLS = 65  # length of the input of a model that reads whole names: a blank, and 64 characters
_README = """# {name}

```python
weights = safetensors.torch.load_file("model.safetensors")  # a tensor for each name
model.load_state_dict(weights)                                 # into a model of the architecture in model.json
```

`model.json` has all details: where the model comes from, its outputs, what its input must be.
"""


def export_model(run_dir: Path, workload: str, target: Path, source: Mapping[str, Any]) -> list[str]:
    """Write a model into the new folder `target`; return the names of the files. Nothing is left if this fails.

    source: what names the model, for the description.

    Raises UsageError if the folder exists or cannot be written, or the model cannot be read.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already: name a new folder")
    about = describe_model(run_dir, workload)
    incoming = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming.mkdir()
        shutil.copyfile(checkpoint_folder(run_dir) / WEIGHTS, incoming / WEIGHTS)
        size_bytes, digest = hash_file(incoming / WEIGHTS)
        files = {WEIGHTS: {"size_bytes": size_bytes, "sha256": digest}}
        text = json.dumps({**source, "torch": torch.__version__, "files": files, **about}, indent=2, ensure_ascii=False)
        (incoming / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        (incoming / "README.md").write_text(_README.format(name=source.get("model", "model")), encoding="utf-8")
        publish(incoming, target)
    except OSError as error:
        raise UsageError(f"can't write the model to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def describe_model(run_dir: Path, workload: str) -> dict[str, Any]:
    """Return the inputs, outputs and architecture of the model of a run directory. Raises UsageError."""
    if workload == "petnames":
        return _petnames(run_dir)
    if workload == "images":
        return _images(run_dir)
    path = checkpoint_folder(run_dir) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # damaged files raise arbitrary errors
        raise UsageError(f"can't read the weights {path}: {type(error).__name__}: {error}") from error
    return {"workload": workload, "tensors": tensors}


def _images(run_dir: Path) -> dict[str, Any]:
    from ddptrain.workloads.images.decode import CENTRE
    from ddptrain.workloads.images.model import load_model

    saved = load_model(run_dir)
    config, size = saved.config.model_dump(), saved.config.image_size
    return {
        "workload": "images",
        "input": {
            "name": "images",
            "dtype": "float32",
            "shape": [_BATCH, 3, size, size],
            "channels": "RGB, normalised: see preprocessing",
        },
        "output": {"name": "scores", "dtype": "float32", "shape": [_BATCH, len(saved.names)], "softmax": False},
        "outputs": list(saved.names),
        "preprocessing": {
            "crop": f"the square in the centre whose side is {CENTRE:g} of the shorter side",
            "resize": [size, size],
            "interpolation": "bilinear, antialiased",
            "normalisation": {"mean": config["mean"], "std": config["std"], "of": "pixels / 255"},
        },
        "architecture": {"name": config["architecture"], "options": config["options"], "n_outputs": len(saved.names)},
    }


def _petnames(run_dir: Path) -> dict[str, Any]:
    from ddptrain.workloads.petnames.generate import load_model

    model, _ = load_model(run_dir)
    windowed = model.config.context == "window"
    length = model.config.window if windowed else _NAME_SYMBOLS
    reads = (
        f"the last {length} symbols, with blanks before the first character"
        if windowed
        else "a blank, then the name, then any symbols: an output depends only on the symbols up to its position"
    )
    return {
        "workload": "petnames",
        "input": {"name": "symbols", "dtype": "uint8", "shape": [_BATCH, length], "content": reads},
        "output": {
            "name": "scores",
            "dtype": "float32",
            "shape": [_BATCH, 1 if windowed else length, len(SYMBOLS)],
            "content": "of each next symbol",
            "softmax": False,
        },
        "alphabet": {"symbols": SYMBOLS, "blank": BLANK, "stop": STOP},
        "architecture": model.config.plain(),
    }
