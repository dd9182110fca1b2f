"""The commands of `ddptrain cluster` without a process: what they ask for, what they print, how they exit."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.cli.main import main
from ddptrain.clusters import lifecycle
from ddptrain.clusters import record as records
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.status import State, View
from ddptrain.config.sections.clusters import BACKENDS, ClusterConfig

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `ddptrain cluster ...`; returns its exit code, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["cluster", *args])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ClusterConfig, str]]:
    """What `up` was asked for; it starts nothing."""
    found: list[tuple[ClusterConfig, str]] = []

    def up(config: ClusterConfig, name: str, tell: Tell, *, if_needed: bool) -> View:
        found.append((config, name))
        return View(ClusterRecord(name=name, config=config), State.UP)

    monkeypatch.setattr(lifecycle, "up", up)
    return found


def entry(name: str, **fields: Any) -> ClusterRecord:
    return records.create(ClusterRecord(name=name, started_at="2026-01-01T00:00:00+00:00", **fields))


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_options_become_the_cluster_section(call: Call, asked: list[tuple[ClusterConfig, str]]) -> None:
    assert call("up")[0] == 0
    config, name = asked[-1]
    assert (config, name) == (ClusterConfig(), "local")

    options = "--name dev --ranks 4 --gpus 0 --idle-timeout 60"
    assert call("up", *options.split())[0] == 0
    config, name = asked[-1]
    assert (name, config.backend, config.ranks, config.gpus) == ("dev", "local", 4, 0)
    assert config.idle_timeout_s == 60

    options = "--host me@a --host b --set cluster.ssh.python=/opt/python"
    assert call("up", *options.split())[0] == 0
    config, name = asked[-1]
    assert config.ssh is not None and (name, config.backend) == ("ssh", "ssh")
    assert (config.ssh.hosts, config.ssh.python) == (["me@a", "b"], "/opt/python")


def test_runs_file_gives_its_cluster_section_and_options_win(
    call: Call, asked: list[tuple[ClusterConfig, str]]
) -> None:
    Path("run.yaml").write_text("workload: petnames\ncluster: {name: pets, ranks: 3, gpus: 0}\n")
    Path("only.yaml").write_text("cluster: {ranks: 5}\n")
    assert call("up", "run.yaml", "--ranks", "2")[0] == 0
    assert call("up", "only.yaml")[0] == 0
    assert [(name, config.ranks) for config, name in asked] == [("pets", 2), ("local", 5)]


@pytest.mark.parametrize("backend", BACKENDS.built_in)
def test_backend_without_its_settings_has_defaults_or_says_which_field_is_missing(
    call: Call, asked: list[tuple[ClusterConfig, str]], backend: str
) -> None:
    """No provider has to expect that its section is missing."""
    code, _, err = call("up", "--backend", backend)
    missing = {"address": "address", "ssh": "ssh.hosts", "kubernetes": "kubernetes.image", "class": "class"}
    if field := missing.get(backend):
        assert code == 2 and f"cluster.{field}: is required, as cluster.backend is {backend}" in err
    else:
        assert code == 0
        config = asked[-1][0].model_dump(mode="json")
        assert backend == "local" or config[backend] is not None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--ranks 0", "--ranks 0: cluster.ranks: expected 'auto' or at least 1, got 0"),
        ("--gpus all", "--gpus all: cluster.gpus: expected 'auto' or a whole number, got the text \"all\""),
        ("--backend slrm", '--backend slrm: cluster.backend: there is no such cluster backend, got the text "slrm"'),
        ("--host a --host", "option '--host' requires an argument"),
        ("--name A", 'a letter or digit, got the text "A" (as in a)'),
        ("--backend address --set cluster.address=a:1", "uses a cluster that is up: there is nothing to start"),
    ],
)
def test_wrong_option_is_named_as_it_was_typed(call: Call, options: str, error: str) -> None:
    code, out, err = call("up", *options.split())
    assert (code, out) == (2, "") and error in err


def test_no_cluster_is_an_empty_list(call: Call) -> None:
    assert call("status") == (0, "", "ddptrain: no clusters; ddptrain cluster up starts one\n")
    assert call("status", "--json") == (0, "[]\n", "")


def test_list_says_why_a_cluster_is_ended(call: Call) -> None:
    address = dead_address()
    entry("dev", address=address)
    entry("half")
    code, out, _ = call("status")
    header, dev, half = out.splitlines()
    assert code == 0 and header.split()[:3] == ["NAME", "STATE", "BACKEND"]
    assert dev == f"dev   ended  local    -      -     2026-01-01 00:00:00  no scheduler listens at {address} any more"
    assert half.endswith("its start was interrupted")
    views = json.loads(call("status", "--json")[1])
    assert [(view["name"], view["state"], view["slots"]) for view in views] == [
        ("dev", "ended", 0),
        ("half", "ended", 0),
    ]


def test_status_of_a_cluster_that_is_ended_exits_with_4(call: Call) -> None:
    entry("dev", parts=[Part(role="job", id="18\x1b[2J")])
    code, out, _ = call("status", "dev")
    assert code == 4
    assert out.startswith("cluster dev\n  state    ended: its start was interrupted\n")
    assert "job" in out and "\x1b" not in out
    assert call("status", "dev", "--json")[0] == 4


def test_name_that_is_nearly_right_is_suggested(call: Call) -> None:
    entry("dev")
    for command in (["status"], ["logs"]):
        code, _, err = call(command[0], "dve", *command[1:])
        assert (code, err) == (2, 'ddptrain: error: there is no cluster "dve" (did you mean dev?)\n')


def test_down_of_a_cluster_that_is_not_there_succeeds_and_suggests_the_nearest(call: Call) -> None:
    nothing = 'ddptrain: there is no cluster "dve", so there is nothing to end'
    assert call("down", "dve") == (0, "", f"{nothing}\n")
    entry("dev")
    assert call("down", "dve") == (0, "", f"{nothing} (did you mean dev?)\n")
    code, out, _ = call("down", "dve", "--json")
    assert (code, json.loads(out)) == (0, {"ended": [], "failed": {}})
    assert [each.name for each in records.every()] == ["dev"]
