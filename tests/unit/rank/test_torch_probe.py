"""What `ddptrain doctor` learns from the process that tries torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from ddptrain.rank import torch_probe


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs, on which everything works."""
    vision = SimpleNamespace(__version__="0.30", ops=SimpleNamespace(nms=lambda *given: None))
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setattr(torch, "__version__", "2.9")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(distributed, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch_probe, "_reduce_with_gloo", lambda: None)
    return monkeypatch


def test_each_part_that_fails_is_a_problem(machine: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operator torchvision::nms\n  does not exist")

    vision = SimpleNamespace(__version__="0.20", ops=SimpleNamespace(nms=fail))
    machine.setitem(sys.modules, "torchvision", vision)
    machine.setattr(torch_probe, "_reduce_with_gloo", lambda: 1 / 0)
    found = torch_probe.probe()
    assert found["torchvision"] == "0.20"
    assert found["problems"] == {"torchvision": "operator torchvision::nms", "gloo": "division by zero"}
