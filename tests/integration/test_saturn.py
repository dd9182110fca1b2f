"""Clusters in Saturn Cloud, through dask-saturn, against a Saturn on loopback with a real scheduler and workers."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished, Running
from tests.integration.test_cluster import Clusters, is_gone, wait_until

pytest.importorskip("dask_saturn", reason='dask-saturn is not installed: pip install "ddptrain[saturn]"')

from dask_saturn.external import _create_csr, _serialize_csr, _serialize_key

from tests.servers.saturn_server import TOKEN, SaturnServer


class SaturnClusters(Clusters):
    """`ddptrain cluster` for that Saturn."""

    def __init__(self, cli: Cli, saturn: SaturnServer) -> None:
        super().__init__(cli)
        self.saturn = saturn

    def __call__(self, *args: str, rc: int = 0, env: dict[str, str] | None = None) -> Finished:
        return super().__call__(*args, rc=rc, env=self.saturn.env if env is None else env)

    def start_up(self, *args: str, env: dict[str, str] | None = None) -> Running:
        options = ("--backend", "saturn", "--name", "dev", "--json", *args)
        return self.cli.start("cluster", "up", *options, env=self.saturn.env if env is None else env)

    def up_in_saturn(self, *args: str, rc: int = 0, env: dict[str, str] | None = None) -> Finished:
        done = self.start_up(*args, env=env).finish()
        assert done.rc == rc, done
        return done

    @property
    def dev(self) -> Path:
        """The folder of the cluster dev."""
        return self.folder / ".state" / "ddptrain" / "clusters" / "dev"


@pytest.fixture
def saturn(tmp_path: Path) -> Iterator[SaturnServer]:
    with SaturnServer(tmp_path / "saturn") as server:
        yield server


@pytest.fixture
def clusters(run_cli: Cli, saturn: SaturnServer) -> Iterator[SaturnClusters]:
    made = SaturnClusters(run_cli, saturn)
    yield made
    if made.entries():
        run_cli("cluster", "down", "--all", "--now", env=saturn.env)


@pytest.mark.timeout(400)
def test_cluster_lives_from_up_to_down_and_never_shows_its_token(
    clusters: SaturnClusters, saturn: SaturnServer
) -> None:
    """All in one, for each worker takes seconds to start."""
    up = clusters.up_in_saturn("--ranks", "2", "--set", "cluster.saturn.worker_size=large", "--idle-timeout", "600")
    told = json.loads(up.stdout)
    assert (told["state"], told["slots"], told["tls"]) == ("up", 2, True)
    assert saturn.config == {"n_workers": 2, "worker_size": "large", "nprocs": 1}
    assert "Saturn: pending\n" in up.stderr and "Saturn: ready\n" in up.stderr
    kept = {path.name: stat.S_IMODE(path.stat().st_mode) for path in clusters.dev.iterdir()}
    assert kept == dict.fromkeys(("cert.pem", "key.pem", "cluster.json", "idle-watch.log"), 0o600)

    # The record is enough for whoever only uses the cluster: no token, no URL.
    calls = len(saturn.calls)
    looked = clusters("status", "dev", "--json", env={})
    assert json.loads(looked.stdout)["free"] == 2
    running = clusters.start_run(ranks=2)
    refused = clusters("scale", "dev", "1", rc=2)
    assert "its backend may end the very workers that these are on" in refused.stderr
    ran = clusters.finish(running)
    assert ran.rc == 0
    logs = clusters("logs", "dev", "--json", env={})
    assert {source.split()[0] for source in json.loads(logs.stdout)} == {"scheduler", "worker"}
    assert saturn.calls[calls:] == []

    certificate_that_has_expired_is_signed_anew(clusters, saturn)
    assert json.loads(clusters("scale", "dev", "3", "--json").stdout)["slots"] == 3
    assert json.loads(clusters("scale", "dev", "1", "--json").stdout)["slots"] == 1
    files = contents(clusters.folder)
    assert {"cluster.json", "run.json", "idle-watch.log"} <= {path.name for path in files}
    assert [path for path, content in files.items() if TOKEN.encode() in content] == []
    assert "SATURN_TOKEN is not set" in clusters("down", "dev", rc=2, env={}).stderr
    down = clusters("down", "dev", env={"SATURN_TOKEN": TOKEN})  # the record knows the URL
    assert (saturn.status, saturn.dask.workers, clusters.entries()) == ("closed", [], [])
    wrong = clusters.up_in_saturn("--set", "cluster.saturn.worker_size=huge", rc=2)
    done = (up, looked, refused, ran, logs, down, wrong)
    assert not [each for each in done if TOKEN in each.stdout + each.stderr]


def contents(folder: Path) -> dict[Path, bytes]:
    """What all files below a folder hold, but for those that go meanwhile; rglob falls over a folder that goes."""
    found = {}
    for name in glob(f"{folder}/**", recursive=True, include_hidden=True):
        with contextlib.suppress(FileNotFoundError):
            if os.path.isfile(name):
                found[Path(name)] = Path(name).read_bytes()
    return found


def certificate_that_has_expired_is_signed_anew(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    authority = saturn.dask.authority
    authority.term = dt.timedelta(seconds=-1)
    request, key = _create_csr("expired")
    (clusters.dev / "key.pem").write_bytes(_serialize_key(key))
    (clusters.dev / "cert.pem").write_bytes(authority.answer(_serialize_csr(request)))
    authority.term = dt.timedelta(days=1)
    refused = clusters.cli("train", "hold.yaml", "--cluster", "dev")
    assert refused.rc == 2 and "SATURN_TOKEN is not set" in refused.stderr
    done = clusters.cli("train", "hold.yaml", "--cluster", "dev", env=saturn.env)
    assert done.rc == 0, done


def test_cluster_that_runs_already_is_attached_to_and_stays(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    saturn.post_clusters(b'{"n_workers": 2}')
    wait_until(lambda: saturn.post_clusters(b'{"n_workers": 2}')[1]["status"] == "ready")
    up = clusters.up_in_saturn()
    assert json.loads(up.stdout)["slots"] == 2, "as it is, not as the settings would have it"
    assert "Saturn warns: The cluster is running: its settings can't be changed." in up.stderr
    assert "was running in Saturn before, and keeps running" in clusters("down", "dev").stderr
    assert (saturn.status, clusters.entries()) == ("ready", [])

    # dask-saturn itself, as it is, finds in this server all that it calls.
    code = (
        "from dask_saturn import SaturnCluster as S; c = S(); c.scale(1); print(c.status, c.name, c.scheduler_address)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=saturn.env, capture_output=True, text=True, timeout=100)
    told = saturn.dask.info()
    assert told is not None and done.stdout.split() == ["ready", "c1d2e3", told["address"]], done.stderr


def test_cluster_comes_for_a_run_and_goes_with_it(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    clusters.go.touch()
    cluster = {"saturn": {"workers": 1, "nprocs": 2, "nthreads": 1}}
    config = {"workload": "work:hold", "params": {"until": str(clusters.go)}, "cluster": cluster}
    (clusters.folder / "hold.yaml").write_text(json.dumps(config))
    done = clusters.cli("train", "hold.yaml", env=saturn.env)
    assert done.rc == 0, done
    assert done.stdout.count("holding") == 2
    assert saturn.config == {"n_workers": 1, "nprocs": 2, "nthreads": 1}
    assert (saturn.status, clusters.entries()) == ("closed", [])


@pytest.mark.slow
def test_forgotten_cluster_is_closed_but_never_one_with_a_run_on_it(
    clusters: SaturnClusters, saturn: SaturnServer
) -> None:
    running, idle_s = clusters.start_run_before_idle(
        lambda idle: clusters.up_in_saturn("--idle-timeout", idle), ranks=1
    )
    watch = clusters.process("idle-watch")
    time.sleep(idle_s + 1)
    assert saturn.status == "ready"
    assert clusters.finish(running).rc == 0
    wait_until(lambda: is_gone(watch))
    assert saturn.status == "closed"
    assert f"idle for {idle_s:g} s" in clusters.status(rc=4)["reason"]
    clusters("down", "dev")
    assert clusters.entries() == []


def test_start_that_takes_too_long_is_ended_in_saturn_too(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    saturn.never_ready = True
    said = clusters.up_in_saturn("--start-timeout", "1", rc=4).stderr
    assert "Saturn's cluster is pending after 1 s (cluster.start_timeout_s)" in said
    assert (saturn.status, clusters.entries()) == ("closed", [])


def test_start_whose_id_is_not_known_yet_is_ended_by_a_later_down(
    clusters: SaturnClusters, saturn: SaturnServer
) -> None:
    saturn.never_ready, saturn.id_at_once = True, False
    said = clusters.up_in_saturn("--start-timeout", "1", rc=4).stderr
    assert "Saturn starts the cluster, and has not returned its id yet" in said
    assert "try ddptrain cluster down dev" in said
    saturn.never_ready = False
    wait_until(lambda: saturn.dask.info() is not None)
    clusters("down", "dev")
    assert (saturn.status, clusters.entries()) == ("closed", [])


def test_interrupted_up_is_ended_in_saturn_too(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    saturn.never_ready = True
    running = clusters.start_up()
    running.wait_for("Saturn: pending")
    running.popen.send_signal(signal.SIGINT)
    done = running.finish()
    assert done.rc == 130, done
    assert (saturn.status, clusters.entries()) == ("closed", [])


def test_cluster_in_error_state_is_told_in_one_line(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    saturn.errors = ["No node of that size is left.", "Ask your administrator."]
    said = clusters.up_in_saturn(rc=4).stderr
    assert "Saturn can't start the cluster: No node of that size is left. Ask your administrator.\n" in said
    assert clusters.entries() == []


def test_cluster_that_ends_in_saturn_is_told(clusters: SaturnClusters, saturn: SaturnServer) -> None:
    clusters.up_in_saturn()
    saturn.post_close()
    wait_until(lambda: saturn.status == "closed")
    assert "no scheduler listens at" in clusters.status(rc=4)["reason"]
    clusters("down", "dev")
    assert clusters.entries() == []


@pytest.mark.parametrize(
    ("change", "rc", "words"),
    [
        ({"SATURN_TOKEN": ""}, 2, "SATURN_TOKEN is not set"),
        ({"SATURN_BASE_URL": ""}, 2, "SATURN_BASE_URL or cluster.saturn.url must be the address of Saturn"),
        ({"SATURN_BASE_URL": "app.saturn"}, 2, 'must be the address of Saturn, as https://..., got "app.saturn"'),
        ({"SATURN_TOKEN": "wrong"}, 2, "refuses the token in SATURN_TOKEN (401: Invalid token)"),
        (
            {"SATURN_BASE_URL": "http://127.0.0.1:1"},
            4,
            "Saturn can't be reached at http://127.0.0.1:1: Connection refused",
        ),
    ],
)
def test_what_keeps_a_cluster_from_being_ordered_is_one_line(
    clusters: SaturnClusters, saturn: SaturnServer, change: dict[str, str], rc: int, words: str
) -> None:
    done = clusters.up_in_saturn(rc=rc, env={**saturn.env, **change})
    *told, line = done.stderr.splitlines()
    assert line.startswith("ddptrain: error: ") and words in line
    assert told == ["ddptrain: ending what was started"]
    assert clusters.entries() == []
