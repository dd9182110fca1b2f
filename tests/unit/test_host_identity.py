"""Whether a process id of a record is valid on this host: decided by machine, boot and namespace, not by name alone."""

from __future__ import annotations

import dataclasses

import pytest

from ddptrain.clusters.processes import Relation, is_loopback, relation
from ddptrain.host_identity import HostId, this_host

HERE = HostId(name="login1", machine="m1", boot="b1", pids="pid:[1]")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Relation.SAME),
        ({"name": "renamed"}, Relation.SAME),  # the same kernel and the same processes, under a new name
        ({"machine": ""}, Relation.SAME),
        ({"boot": "b0"}, Relation.RESTARTED),
        ({"boot": "b0", "name": "login2"}, Relation.OTHER),  # a clone of the machine
        ({"boot": "b0", "machine": "m2"}, Relation.OTHER),  # containers with the same host name
        ({"boot": "b0", "machine": ""}, Relation.OTHER),
        ({"boot": "b0", "pids": "pid:[2]"}, Relation.OTHER),  # containers of one image: its machine id is the same
        ({"pids": "pid:[2]"}, Relation.OTHER),  # containers on one machine
        ({"pids": "pid:[2]", "name": "c2"}, Relation.OTHER),
        ({"boot": ""}, Relation.SAME),  # a system without boot ids
        ({"boot": "", "name": "login2"}, Relation.OTHER),
        ({"name": "login2", "machine": "m2", "boot": "b2"}, Relation.OTHER),
        ({"name": "", "machine": "", "boot": "", "pids": ""}, Relation.SAME),  # a record without a host
    ],
)
def test_relation_of_a_recorded_host_to_this_one(changes: dict[str, str], expected: Relation) -> None:
    assert relation(dataclasses.replace(HERE, **changes), HERE) == expected


def test_this_host_is_known_by_more_than_its_name() -> None:
    here = this_host()
    assert here.name and here.boot and here.pids
    assert relation(here, here) == Relation.SAME


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("gpu1", False),
    ],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
