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
    assert network_hint(off) == "InfiniBand is there (mlx5_0), but NCCL_IB_DISABLE turns it off"
    down = host("a", gpus=(GPU,), fabrics=(dataclasses.replace(port, is_active=False),))
    assert network_hint(down) == "the RDMA ports of mlx5_0 are not active: see ibstat"
