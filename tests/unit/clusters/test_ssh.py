"""The backend ssh, less the ssh: which host gets how many slots, and what its errors say."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters.ssh import _distribution
from ddptrain.clusters.sshhost import Host, hosts_of
from ddptrain.errors import ClusterError, UsageError


def settings(each: str | int = "auto", ranks: str | int = "auto", gpus: str | int = "auto") -> dict[str, Any]:
    return {"ranks": ranks, "gpus": gpus, "ssh": {"ranks_per_host": each}}


@pytest.mark.parametrize(
    ("given", "slots", "hosts", "expected"),
    [
        (settings(), None, 2, [None, None]),
        (settings(each=4), None, 2, [4, 4]),
        (settings(ranks=3), None, 2, [2, 1]),
        (settings(each=4, ranks=6), None, 2, [4, 2]),
        (settings(each=4, ranks=3), None, 2, [3, 0]),
        (settings(ranks=3), 5, 2, [3, 2]),
        (settings(each=2), 1, 3, [1, 0, 0]),
    ],
)
def test_slots_are_dealt_out_host_by_host(
    given: dict[str, Any], slots: int | None, hosts: int, expected: list[int | None]
) -> None:
    assert _distribution(given, hosts, slots) == expected


def test_more_slots_than_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="9 slots don't fit on 2 hosts with 4 each"):
        _distribution(settings(each=4), 2, 9)


def test_number_of_gpus_is_a_matter_of_each_host() -> None:
    with pytest.raises(UsageError, match=r"cluster\.gpus is 4: with backend ssh it is auto or 0"):
        _distribution(settings(gpus=4), 2, None)


def fake_ssh(folder: Path, script: str) -> Host:
    command = folder / "ssh"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return Host("gpu1", "me@gpu1", 0, (str(command),), "python3")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", "gpu1: ssh can't get there: Permission denied"),
        ("echo 'sh: python3: not found' >&2; exit 127", "gpu1: there is no python3 there"),
        ("echo 'No module named ddptrain' >&2; exit 1", "gpu1: ddptrain is missing there: python3 -m pip install"),
        ("echo 'unknown option -P' >&2; exit 2", "gpu1: python3 is too old there"),
        ('echo \'{"error": "the disk is full"}\'', "gpu1: the disk is full"),
        ("exit 0", "gpu1: exit code 0"),
    ],
)
def test_what_is_wrong_with_a_host_is_one_line(tmp_path: Path, script: str, told: str) -> None:
    with pytest.raises(ClusterError) as refused:
        fake_ssh(tmp_path, script).call("alive", daemons=[])
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_words_of_a_login_script_are_passed_over(tmp_path: Path) -> None:
    host = fake_ssh(tmp_path, "cat >/dev/null; echo welcome; echo '{\"result\": [true]}'")
    assert host.call("alive", daemons=[]) == [True]


def test_host_that_is_named_twice_has_two_names() -> None:
    ssh = {"hosts": ["a", "b", "a"], "command": "ssh", "options": ["-F", "f"], "python": "p"}
    hosts = hosts_of({"ssh": ssh})
    assert [host.name for host in hosts] == ["a#1", "b", "a#3"]
    assert hosts[0].ssh == ("ssh", "-F", "f")
