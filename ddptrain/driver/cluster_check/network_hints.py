"""Hints for a slow network of a host: another interface, InfiniBand."""

from __future__ import annotations

import ipaddress

from ddptrain.driver.cluster_check.readings import HostReading
from ddptrain.protocol.cluster_check import HostFacts, Interface

_OFF = frozenset({"1", "true", "yes"})
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "dummy")


def link_of(host: HostReading) -> str:
    """Return the interface that gloo uses as text, for example `eth0, 10 Gbit/s`."""
    link = host.interface
    if link is None:
        name = host.facts.interface if host.facts is not None else ""
        return name or "an unknown interface"
    return f"{link.name}, {link.speed_mbit / 1e3:g} Gbit/s" if link.speed_mbit else link.name


def network_hint(host: HostReading) -> str:
    """Return what to try first on this host; "" if nothing is known."""
    facts, link = host.facts, host.interface
    if facts is None:
        return ""
    if link is None:
        wanted = facts.network_env.get("GLOO_SOCKET_IFNAME", "")
        return f"there is no interface {wanted} (GLOO_SOCKET_IFNAME)" if wanted else ""
    if not link.is_up:
        return f"the interface {link.name} is down"
    if facts.gpus and (hint := _rdma_hint(facts)):
        return hint
    faster = [each for each in facts.interfaces if _usable(each) and each.speed_mbit > link.speed_mbit > 0]
    if faster:
        best = max(faster, key=lambda each: each.speed_mbit)
        nccl = f" and NCCL_SOCKET_IFNAME: {best.name}" if facts.gpus else ""
        return (
            f"{best.name} has {best.speed_mbit / 1e3:g} Gbit/s: set GLOO_SOCKET_IFNAME: {best.name}{nccl} in env of "
            "the configuration"
        )
    others = [each.name for each in facts.interfaces if _usable(each) and each.name != link.name]
    either = f"if the other hosts are reached over {' or '.join(others)}, set GLOO_SOCKET_IFNAME; " if others else ""
    return f"{either}check cable, switch port and driver of {link.name} (ethtool {link.name})"


def _rdma_hint(facts: HostFacts) -> str:
    active = [fabric for fabric in facts.fabrics if fabric.is_active]
    down = [fabric.device for fabric in facts.fabrics if not fabric.is_active]
    if facts.network_env.get("NCCL_IB_DISABLE", "0").lower() in _OFF and active:
        return f"{active[0].kind} is available ({active[0].device}), but NCCL_IB_DISABLE disables it"
    if down:
        return f"the RDMA ports of {', '.join(down)} are not active: see ibstat"
    return ""


def _usable(link: Interface) -> bool:
    """Return whether an interface may reach other hosts: it is up, physical, and has a routable address."""
    return (
        link.is_up and not link.name.startswith(_VIRTUAL) and any(_is_routable(address) for address in link.addresses)
    )


def _is_routable(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local)
