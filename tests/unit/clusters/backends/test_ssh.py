"""The backend ssh, less the ssh: which host gets how many slots, and what its errors say."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddptrain import __version__
from ddptrain.clusters.backends.ssh import _address, _distribution, _link
from ddptrain.clusters.backends.ssh_host import Host, hosts_of
from ddptrain.errors import ClusterError, UsageError


def settings(
    each: str | int = "auto", ranks: str | int | dict[str, int] = "auto", gpus: str | int = "auto"
) -> dict[str, Any]:
    return {"ranks": ranks, "gpus": gpus, "ssh": {"ranks_per_host": each}}


@pytest.mark.parametrize(
    ("given", "slots", "hosts", "expected"),
    [
        (settings(), None, 2, [None, None]),
        (settings(each=4), None, 2, [4, 4]),
        (settings(ranks=3), None, 2, [2, 1]),
        (settings(each=4, ranks=6), None, 2, [4, 2]),
        (settings(ranks={"min": 1, "max": 6}), None, 2, [3, 3]),
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
    command.write_text(f"#!/bin/sh\ncd {folder}\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return Host("gpu1", "me@gpu1", 0, (str(command),), "python3")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "echo 'Permission denied (publickey).' >&2; exit 255",
            "gpu1: ssh can't connect: Permission denied (publickey); this must work without a question: /",
        ),
        ("echo 'sh: python3: not found' >&2; exit 127", "gpu1: there is no python3 there"),
        ("echo 'No module named ddptrain' >&2; exit 1", "gpu1: ddptrain is missing there: python3 -m pip install"),
        (
            "echo \"ModuleNotFoundError: No module named 'psutil._ps'\" >&2; exit 1",
            "gpu1: psutil is missing there: python3 -m pip install",
        ),
        ("echo 'Unknown option: -P' >&2; echo usage >&2; exit 2", "gpu1: python3 is too old there"),
        ('echo \'{"error": "the disk is full"}\'', "gpu1: the disk is full"),
        ("exit 0", "gpu1: python3 is not Python 3.11 or newer there (exit code 0): set cluster.ssh.python"),
        ("echo 'sh: 0: Illegal option -P' >&2; exit 2", "gpu1: python3 is not Python 3.11 or newer there (sh: 0: "),
        ("echo 'SyntaxError: invalid syntax' >&2; exit 1", "gpu1: python3 is not Python 3.11 or newer there (Syntax"),
        ("echo 'MemoryError' >&2; exit 1", "gpu1: MemoryError"),
    ],
)
def test_what_is_wrong_with_a_host_is_one_line(tmp_path: Path, script: str, told: str) -> None:
    with pytest.raises(ClusterError) as refused:
        fake_ssh(tmp_path, script).call("alive", daemons=[])
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_words_that_are_no_utf8_are_passed_over(tmp_path: Path) -> None:
    host = fake_ssh(tmp_path, "cat >/dev/null; printf 'gr\\374\\337\\n'; echo '{\"result\": 1}'; printf '\\374\\n' >&2")
    assert host.call("alive", daemons=[]) == 1


def test_banner_of_a_login_script_that_does_not_end_its_line_is_passed_over(tmp_path: Path) -> None:
    host = fake_ssh(tmp_path, f"printf 'Welcome! {{'; exec {sys.executable} -P -m ddptrain.clusters.processes alive")
    assert host.call("alive", daemons=[]) == []


@pytest.mark.parametrize(
    ("reached_at", "own", "address"),
    [
        ("10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", "127.0.1.1", "10.0.0.5"),  # Debian has the host's own name on its loopback
        ("127.0.0.1", "10.0.0.5", "10.0.0.5"),  # ssh comes through a tunnel that ends there
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("", "", "gpu1"),
    ],
)
def test_host_listens_where_others_reach_it(tmp_path: Path, reached_at: str, own: str, address: str) -> None:
    about = {"version": __version__, "addresses": {"gpu1": own}, "reached_at": reached_at}
    host = fake_ssh(tmp_path, f"[ $1 = -G ] && exec echo hostname gpu1; echo '{json.dumps({'result': about})}'")
    assert _address(host) == address


def test_other_version_on_a_host_is_told(tmp_path: Path) -> None:
    about = {"version": "0.0.1", "addresses": {"gpu1": ""}, "reached_at": "10.0.0.5"}
    host = fake_ssh(tmp_path, f"[ $1 = -G ] && exec echo hostname gpu1; echo '{json.dumps({'result': about})}'")
    with pytest.raises(ClusterError, match=r"gpu1: ddptrain 0\.0\.1 is installed there, this is "):
        _address(host)


def test_dashboard_of_another_host_comes_with_the_way_there() -> None:
    link, host = "http://127.0.0.1:8787/status", Host("gpu1", "me@gpu1", 0, ("ssh",), "python3")
    assert _link(host, "10.0.0.5", link) == f"{link} through ssh -N -L 127.0.0.1:8787:127.0.0.1:8787 me@gpu1"
    assert _link(host, "127.0.0.1", link) == link
    assert _link(host, "10.0.0.5", "") == ""


def test_master_that_ssh_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    host = fake_ssh(tmp_path, "sleep 300 >/dev/null & echo $! >master; echo '{\"result\": 1}'")
    began = time.monotonic()
    try:
        assert host.call("alive", daemons=[]) == 1 and time.monotonic() - began < 55
    finally:
        os.kill(int((tmp_path / "master").read_text()), signal.SIGKILL)


def test_words_of_a_login_script_are_passed_over(tmp_path: Path) -> None:
    host = fake_ssh(tmp_path, "cat >/dev/null; echo welcome; echo '{\"result\": [true]}'")
    assert host.call("alive", daemons=[]) == [True]


def test_host_that_is_named_twice_has_two_names() -> None:
    ssh = {"hosts": ["a", "b", "a"], "command": "ssh", "options": ["-F", "f"], "python": "p"}
    hosts = hosts_of({"ssh": ssh})
    assert [host.name for host in hosts] == ["a#1", "b", "a#3"]
    assert hosts[0].ssh == ("ssh", "-F", "f")
