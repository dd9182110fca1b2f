"""What a user should set."""

from __future__ import annotations

import dataclasses

from ddptrain.driver.cluster_check.network_hints import link_of, network_hint
from ddptrain.protocol.cluster_check import Fabric
from tests.unit.driver.cluster_check.hosts import ETH0, GPU, IB0, host


def test_faster_interface_is_named_with_the_variables() -> None:
    hint = network_hint(host("a", interfaces=(ETH0, IB0)))
    assert hint == "ib0 has 200 Gbit/s: set GLOO_SOCKET_IFNAME: ib0 in env of the configuration"
    hint = network_hint(host("a", interfaces=(ETH0, IB0), gpus=(GPU,)))
    assert "GLOO_SOCKET_IFNAME: ib0 and NCCL_SOCKET_IFNAME: ib0" in hint


def test_interfaces_that_lead_nowhere_are_not_advised() -> None:
    docker = dataclasses.replace(IB0, name="docker0")
    local = dataclasses.replace(IB0, name="eth1", addresses=("fe80::1%eth1", "169.254.0.1"))
    down = dataclasses.replace(IB0, name="eth2", is_up=False)
    hint = network_hint(host("a", interfaces=(ETH0, docker, local, down)))
    assert hint == "check cable, switch port and driver of eth0 (ethtool eth0)"


def test_variable_that_names_no_interface_is_found() -> None:
    found = host("a", network_env={"GLOO_SOCKET_IFNAME": "eth9"})
    assert network_hint(found) == "there is no interface eth9 (GLOO_SOCKET_IFNAME)"


def test_interface_of_the_variable_is_the_one_in_use() -> None:
    found = host("a", interfaces=(ETH0, IB0), network_env={"GLOO_SOCKET_IFNAME": "ib0"})
    assert link_of(found) == "ib0, 200 Gbit/s"
    assert "if the other hosts are reached over eth0, set GLOO_SOCKET_IFNAME" in network_hint(found)


def test_rdma_that_is_off_or_down_is_named_on_hosts_with_gpus() -> None:
    port = Fabric("mlx5_0", "InfiniBand", True, 200.0)
    off = host("a", gpus=(GPU,), fabrics=(port,), network_env={"NCCL_IB_DISABLE": "1"})
    assert network_hint(off) == "InfiniBand is available (mlx5_0), but NCCL_IB_DISABLE disables it"
    down = host("a", gpus=(GPU,), fabrics=(dataclasses.replace(port, is_active=False),))
    assert network_hint(down) == "the RDMA ports of mlx5_0 are not active: see ibstat"


def test_interface_is_named_as_far_as_it_is_known() -> None:
    assert link_of(host("a")) == "eth0, 10 Gbit/s"
    assert link_of(host("a", interfaces=(dataclasses.replace(ETH0, speed_mbit=0),))) == "eth0"
    assert link_of(host("a", interface="eth7")) == "eth7"
    assert link_of(host("a", interface="")) == link_of(host("a", error="silent")) == "an unknown interface"


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert network_hint(host("a", error="silent")) == network_hint(host("a", interface="eth7")) == ""


def test_interface_that_is_down_is_told_before_a_faster_one() -> None:
    down = dataclasses.replace(ETH0, is_up=False)
    assert network_hint(host("a", interfaces=(down, IB0))) == "the interface eth0 is down"


def test_fastest_interface_is_advised_and_one_of_the_same_or_an_unknown_speed_is_only_mentioned() -> None:
    faster = dataclasses.replace(ETH0, name="eth1", speed_mbit=25_000)
    hint = network_hint(host("a", interfaces=(ETH0, faster, IB0, dataclasses.replace(faster, name="eth2"))))
    assert hint == "ib0 has 200 Gbit/s: set GLOO_SOCKET_IFNAME: ib0 in env of the configuration"
    same = dataclasses.replace(ETH0, name="eth1")
    advice = "check cable, switch port and driver of eth0 (ethtool eth0)"
    other = f"if the other hosts are reached over eth1, set GLOO_SOCKET_IFNAME; {advice}"
    assert network_hint(host("a", interfaces=(ETH0, same))) == other
    unknown = dataclasses.replace(ETH0, speed_mbit=0)
    assert network_hint(host("a", interfaces=(unknown, same))) == other


def test_rdma_that_works_or_that_no_gpu_uses_is_no_hint() -> None:
    port = Fabric("mlx5_0", "InfiniBand", True, 200.0)
    other = Fabric("mlx5_1", "InfiniBand", False, 200.0)
    advice = "check cable, switch port and driver of eth0 (ethtool eth0)"
    assert network_hint(host("a", gpus=(GPU,), fabrics=(port,))) == advice
    assert network_hint(host("a", gpus=(GPU,), fabrics=(port,), network_env={"NCCL_IB_DISABLE": "0"})) == advice
    assert network_hint(host("a", gpus=(GPU,), network_env={"NCCL_IB_DISABLE": "1"})) == advice
    assert network_hint(host("a", fabrics=(port,), network_env={"NCCL_IB_DISABLE": "1"})) == advice
    both = host("a", gpus=(GPU,), fabrics=(port, other))
    assert network_hint(both) == "the RDMA ports of mlx5_1 are not active: see ibstat"
    off = host("a", gpus=(GPU,), fabrics=(other, port), network_env={"NCCL_IB_DISABLE": "True"})
    assert network_hint(off) == "InfiniBand is available (mlx5_0), but NCCL_IB_DISABLE disables it"
