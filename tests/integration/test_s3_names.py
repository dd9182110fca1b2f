"""Pet names from a real S3 server on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.names import load_names

RCLONE = Path(sys.executable).with_name("rclone")


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options for fsspec that reach a server with one bucket, `pets`, that holds names.txt."""
    if not RCLONE.exists():
        pytest.skip(f"no {RCLONE}: install the dev extra")
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets" / "names.txt").write_text("rex\nbella\nN0t a name\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--addr 127.0.0.1:{port} --auth-key key,secret --config".split()
    command = [str(RCLONE), "serve", "s3", *options, "", str(tmp_path)]
    with (tmp_path / "rclone.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while b"Starting s3 server" not in (tmp_path / "rclone.log").read_bytes():
        assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "rclone.log").read_text()
        time.sleep(0.05)
    yield {"key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{port}"}
    server.terminate()
    server.wait(10)


def load(url: str, options: dict[str, Any]) -> tuple[str, ...]:
    return load_names(url, names_format="auto", column=None, options=options, unique=True, max_length=64).names


def test_names_are_read_from_a_bucket(s3: dict[str, Any]) -> None:
    assert load("s3://pets/names.txt", s3) == ("rex", "bella")


def test_missing_object_is_a_clear_error(s3: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"can't read params\.names 's3://pets/none\.txt'"):
        load("s3://pets/none.txt", s3)
