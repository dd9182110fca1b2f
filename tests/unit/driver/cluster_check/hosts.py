"""Builds readings of hosts for tests: sound ones, which a test changes."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddptrain.driver.cluster_check.readings import ClockOffset, HostReading, RankReading
from ddptrain.protocol.cluster_check import GpuFacts, HostFacts, Interface, ProbeLine

CLOCK = ClockOffset(0.001, 0.001)
VERSIONS = {"python": "3.11.7", "torch": "2.9.0", "ddptrain": "0.1.0", "distributed": "2026.8.0"}
ETH0 = Interface("eth0", ("10.0.0.1", "fe80::1%eth0"), 10_000, 1500, True)
IB0 = Interface("ib0", ("10.1.0.1",), 200_000, 2044, True)
GPU = GpuFacts(0, "GPU-1", "NVIDIA H100", 80_000, 100, ecc_errors=0, pcie_gen=5, pcie_width=16, pcie_width_max=16)


def facts(**changes: Any) -> HostFacts:
    sound = HostFacts(
        hostname="node",
        versions=VERSIONS,
        cores=16,
        memory_mb=64_000,
        memory_free_mb=60_000,
        shm_mb=32_000,
        shm_free_mb=32_000,
        scratch="/scratch",
        scratch_mb=1_000_000,
        scratch_free_mb=500_000,
        scratch_write_mb_s=1_000.0,
        open_files=65_536,
        interface="eth0",
        interfaces=(ETH0,),
        routes=("default eth0",),
    )
    return dataclasses.replace(sound, **changes)


def host(name: str, *ranks: RankReading, clock: ClockOffset = CLOCK, error: str = "", **changes: Any) -> HostReading:
    found = None if error else facts(hostname=name, **changes)
    return HostReading(name, (f"tcp://{name}:1",), found, None if error else clock, ranks, error)


def rank(number: int = 0, *lines: ProbeLine, gflops: float = 100.0, device: str = "", error: str = "") -> RankReading:
    gemm = ProbeLine("gemm", "done", values={"gflops": gflops})
    return RankReading(number, (gemm, *lines), device, error)


def pair(peer: int, gb_s: float, latency_us: float = 50.0) -> ProbeLine:
    return ProbeLine("pair", "done", peer, {"gb_s": gb_s, "latency_us": latency_us})
