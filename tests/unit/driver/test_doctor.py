"""What `ddptrain doctor` concludes from what it has read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddptrain.driver.doctor import (
    Check,
    Result,
    TorchFacts,
    judge_differences,
    judge_host,
    judge_speed,
    judge_torch,
)
from ddptrain.worker.host_facts import GpuFacts, HostFacts

CUDA = TorchFacts("2.9", "12.8", "0.24", gpus=2, nccl=True)
FACTS = HostFacts(
    hostname="vm",
    versions={"python": "3.11.7", "torch": "2.9.0"},
    cores=2,
    memory_mb=64_000,
    memory_free_mb=60_000,
    shm_mb=32_000,
    shm_free_mb=32_000,
    scratch="/data",
    scratch_mb=90_000,
    scratch_free_mb=50_000,
    open_files=65_536,
)
GPU = GpuFacts(0, "NVIDIA H100", 80_000, 100, ecc_errors=0)


def bad(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.subject, check.text) for check in checks if check.result == Result.BAD]


@pytest.mark.parametrize(
    ("found", "gpus", "expected"),
    [
        (CUDA, 2, []),
        (TorchFacts("2.9", "", "0.24"), 0, []),
        (
            TorchFacts("2.9", "12.8", "0.24", nccl=True),
            2,
            [("GPUs", "torch for CUDA 12.8 can use 0 of 2, with the driver 470.1")],
        ),
        (
            TorchFacts("2.9", "", "0.24"),
            1,
            [
                ("GPUs", "1 are here, but torch 2.9 is built without CUDA"),
                ("nccl", "torch is built without NCCL"),
            ],
        ),
        (
            TorchFacts("2.9", "", problems={"torchvision": "no operator nms", "gloo": "no device"}),
            0,
            [
                ("torchvision", "it does not work: no operator nms"),
                ("gloo", "an all-reduce with gloo failed: no device"),
            ],
        ),
        (TorchFacts(problems={"torch": "No module"}), 2, [("torch", "torch does not work: No module")]),
    ],
)
def test_torch_must_fit_the_gpus(found: TorchFacts, gpus: int, expected: list[tuple[str, str]]) -> None:
    assert bad(list(judge_torch(found, gpus, "470.1"))) == expected


@pytest.mark.parametrize(
    ("changes", "subject", "result"),
    [
        ({}, None, Result.OK),
        ({"memory_free_mb": 10}, "memory", Result.WARNING),
        ({"shm_free_mb": 64}, "shm", Result.BAD),
        ({"scratch_free_mb": 500}, "disk", Result.BAD),
        ({"scratch_free_mb": 5_000}, "disk", Result.WARNING),
        ({"open_files": 256}, "open files", Result.BAD),
        ({"problems": ("/data can't be read",)}, "reading", Result.BAD),
        ({"gpus": (dataclasses.replace(GPU, ecc_errors=3),)}, "ECC", Result.BAD),
        ({"gpus": (dataclasses.replace(GPU, throttled=("thermal",)),)}, "throttling", Result.BAD),
        ({"gpus": (dataclasses.replace(GPU, memory_used_mb=40_000),)}, "GPU memory", Result.WARNING),
    ],
)
def test_fault_of_a_host_is_found(changes: dict[str, Any], subject: str | None, result: Result) -> None:
    checks = judge_host(dataclasses.replace(FACTS, **changes), 2)
    found = [(check.subject, check.result) for check in checks if check.result is not Result.OK]
    assert found == ([(subject, result)] if subject else [])


def test_host_that_differs_from_most_is_named() -> None:
    other = dataclasses.replace(FACTS, hostname="b", versions={"python": "3.11.9", "torch": "2.8.0"})
    (check,) = judge_differences([FACTS, other, dataclasses.replace(FACTS, hostname="c")])
    assert (check.subject, check.result, check.host) == ("torch", Result.BAD, "b")
    (check,) = judge_differences([FACTS, other])
    assert (check.subject, check.host) == ("torch", "")  # of two, nobody knows which one is wrong


@pytest.mark.parametrize(("slowest", "result"), [(10.0, Result.BAD), (70.0, Result.WARNING), (95.0, None)])
def test_host_far_below_the_median_is_named(slowest: float, result: Result | None) -> None:
    found = [(check.host, check.result) for check in judge_speed({"a": [100.0, 99.0], "b": [slowest]})]
    assert found == ([("b", result)] if result else [])
    assert list(judge_speed({"a": [100.0], "b": [slowest]})) == []
