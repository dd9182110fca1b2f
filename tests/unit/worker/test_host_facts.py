"""Facts of a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.protocol.cluster_check import Fabric, HostFacts, ProbeLine, lines_of
from ddptrain.worker.host_facts import fabrics_of, host_facts, routes_of

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
ib0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t0000020A\t00000000\t0000\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the table has the byte order of the host")
def test_routes_that_are_up_are_listed() -> None:
    assert list(routes_of(ROUTES)) == ["default eth0", "10.1.0.0/16 ib0"]


def test_ports_of_rdma_devices_are_listed(tmp_path: Path) -> None:
    for device, layer, state, rate in (
        ("mlx5_0", "InfiniBand", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_1", "Ethernet", "1: DOWN", "25 Gb/sec (1X EDR)"),
        ("efa_0", "Unspecified", "4: ACTIVE", "12.5 Gb/sec (1X)"),
    ):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("link_layer", layer), ("state", state), ("rate", rate)):
            (port / name).write_text(f"{text}\n")
    assert list(fabrics_of(tmp_path)) == [
        Fabric("efa_0", "EFA", True, 12.5),
        Fabric("mlx5_0", "InfiniBand", True, 200.0),
        Fabric("mlx5_1", "RoCE", False, 25.0),
    ]
    assert list(fabrics_of(tmp_path / "missing")) == []


def test_facts_of_this_host_survive_the_way_to_the_driver(tmp_path: Path) -> None:
    facts = host_facts(tmp_path, "lo")
    assert facts.cores >= 1 and facts.memory_mb > 0 and facts.open_files > 0
    assert facts.scratch_write_mb_s is not None and facts.scratch_write_mb_s > 0
    assert list(tmp_path.iterdir()) == []
    assert HostFacts.from_json(facts.to_json()) == facts


def test_folder_that_is_missing_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    facts = host_facts(tmp_path / "missing", "lo")
    assert facts.scratch_write_mb_s is None
    assert [problem.rpartition(": ")[2] for problem in facts.problems[:2]] == ["No such file or directory"] * 2


def test_measurements_are_found_between_other_output() -> None:
    gemm = ProbeLine("gemm", "done", values={"gflops": 2.0})
    log = b"NCCL version 2.30\n" + gemm.line().encode() + b"ddptrain-check {broken\nRuntimeError: no\xff GPU\n\n"
    assert lines_of(log) == ((gemm,), "RuntimeError: no\N{REPLACEMENT CHARACTER} GPU")


def test_message_with_a_wrong_field_is_refused() -> None:
    with pytest.raises(ValueError, match="stage must be text"):
        ProbeLine.from_json('{"stage": 1, "status": "done"}')
    with pytest.raises(ValueError, match="nested too deeply"):
        HostFacts.from_json("[" * 100_000)
