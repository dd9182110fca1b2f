"""No reader of a checkpoint executes what is in it: whoever can write a checkpoint must not run programs with it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.rank.checkpoint.files import read_state
from ddptrain.rank.checkpoint.snapshot import from_bytes
from ddptrain.workloads.images.evaluate_checkpoint import _known_classes
from ddptrain.workloads.saved_model import load_checkpoint


class Program:
    """Makes a folder when it is loaded by executing the pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "read",
    [
        read_state,
        lambda folder: from_bytes((folder / "state.pt").read_bytes()),
        lambda folder: load_checkpoint(folder, "images", lambda config: torch.nn.Linear(1, 1)),
        lambda folder: _known_classes({"a": folder}),
    ],
)
def test_program_in_a_checkpoint_is_not_executed(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    file = io.BytesIO()
    torch.save({"extra": Program(tmp_path / "executed")}, file)
    (tmp_path / "state.pt").write_bytes(file.getvalue())
    with contextlib.suppress(Exception):  # each reader has an error of its own, or none
        read(tmp_path)
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)  # what readers must not do
    assert (tmp_path / "executed").exists()
