"""`workload: images` whose bucket does not exist, or whose server is silent: no rank starts, no secret is written."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Cli
from tests.servers.faultproxy import Fault, fault_proxy
from tests.servers.s3server import S3Server, s3_server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path) as server:
        (server.buckets / "images").mkdir()
        yield server


def write_config(cli: Cli, cluster: str, source: str, options: dict[str, Any]) -> str:
    params = {"source": source, "source_options": options}
    config = {"workload": "images", "params": params, "cluster": {"address": cluster, "ranks": 2}}
    (cli.folder / "pictures.yaml").write_text(json.dumps(config))
    return "pictures.yaml"


def record(cli: Cli, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cli.folder / "runs" / run / "run.json").read_text())
    return found


def test_bucket_that_does_not_exist_ends_the_command_and_no_secret_is_written(
    run_cli: Cli, warm_cluster: str, s3: S3Server
) -> None:
    options = s3.options | {"secret_access_key": "t0pS3cret", "token": "t0k3n"}
    config = write_config(run_cli, warm_cluster, "s3://no-such-bucket/dogs", options)
    done = run_cli("train", config, "--run-id", "none")
    assert done.rc == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ddptrain: run none failed: s3://no-such-bucket/dogs ")
    ended = record(run_cli, "none")
    assert (ended["status"], ended["exit_code"], ended["attempts"]) == ("failed", 2, [])
    written = [path.read_bytes() for path in (run_cli.folder / "runs").rglob("*") if path.is_file()]
    said = f"{done.stdout}{done.stderr}".encode()
    assert all(secret not in content for secret in (b"t0pS3cret", b"t0k3n") for content in [*written, said])


def test_signal_while_the_store_is_silent_ends_the_command(run_cli: Cli, warm_cluster: str, s3: S3Server) -> None:
    with fault_proxy(s3.port) as proxy:
        proxy.inject(Fault("stall", delay_s=60))
        options = s3.options | {"endpoint": proxy.url}
        running = run_cli.start(
            "train", write_config(run_cli, warm_cluster, "s3://images/dogs", options), "--run-id", "stopped"
        )
        deadline = time.monotonic() + PATIENCE_S
        while not proxy.counts().get("list"):
            assert time.monotonic() < deadline and running.popen.poll() is None, running.stderr
            time.sleep(0.05)
        running.popen.send_signal(signal.SIGTERM)
        assert running.finish(40).rc == 143, running.stderr
    ended = record(run_cli, "stopped")
    assert (ended["status"], ended["exit_code"]) == ("cancelled", 143)
