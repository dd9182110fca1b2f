"""Pairs of hosts in rounds."""

from __future__ import annotations

import itertools

import pytest

from ddptrain.driver.cluster_check.probe_plan import rounds


@pytest.mark.parametrize("hosts", range(2, 12))
def test_each_pair_meets_once_and_no_host_is_in_two_pairs_of_a_round(hosts: int) -> None:
    found = rounds(hosts, hosts)
    assert len(found) == hosts - 1 + hosts % 2
    for pairs in found:
        members = [host for pair in pairs for host in pair]
        assert len(members) == len(set(members))
    met = [pair for pairs in found for pair in pairs]
    assert sorted(met) == [*itertools.combinations(range(hosts), 2)]


def test_number_of_rounds_is_limited_and_every_host_is_measured() -> None:
    found = rounds(128, 7)
    assert len(found) == 7
    assert all(len(pairs) == 64 for pairs in found)


def test_one_host_has_no_pairs() -> None:
    assert rounds(1, 7) == rounds(0, 7) == ()
