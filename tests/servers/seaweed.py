"""A real S3 server that keeps the conditions of writes (If-None-Match, If-Match), on loopback: SeaweedFS."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from obstore.store import S3Store

from tests.servers.ports import free_ports

WEED = Path(sys.executable).with_name("weed")
_PARTS = ("master", "volume", "filer", "s3")
# Ports that it opens unless told otherwise are off: a second server could not have them. It reports to nobody.
_OFF = ("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false")
_SMALL = ("-master.volumeSizeLimitMB=64", "-volume.max=20")


@contextmanager
def seaweed(folder: Path, bucket: str, address: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Serve an empty bucket at an address of this machine; yields the variables that lead every client to it.

    Skips where there is no SeaweedFS.
    """
    from fsspec import filesystem

    if not WEED.exists():
        pytest.skip(f"no {WEED}: install the dev extra")
    keys = {"accessKey": "key", "secretKey": "secret"}
    who = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    (folder / "data").mkdir()
    ports = free_ports(2 * len(_PARTS))
    words = [f"-{part}.port={ports.pop()}" for part in _PARTS] + [f"-{part}.port.grpc={ports.pop()}" for part in _PARTS]
    port = next(word.partition("=")[2] for word in words if word.startswith("-s3.port="))
    sockets = [f"-{part}.localSocket={folder / part}.sock" for part in ("filer", "s3")]
    places = [f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}"]
    log = folder / "weed.log"
    with log.open("wb") as out:
        command = [
            str(WEED),
            "server",
            "-filer",
            "-s3",
            *words,
            f"-ip={address}",
            f"-ip.bind={address}",
            *places,
            *sockets,
            *_OFF,
            *_SMALL,
        ]
        server = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    url = f"http://{address}:{port}"
    try:
        fs = filesystem("s3", key="key", secret="secret", endpoint_url=url, skip_instance_cache=True)
        deadline = time.monotonic() + 100
        while True:
            try:
                fs.makedirs(bucket, exist_ok=True)
                fs.pipe_file(f"{bucket}/is-up", b"")
                break
            except Exception:  # of botocore or OSError: its parts come up one after another
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
    finally:
        server.kill()  # what it has is in a folder that goes as well; asked kindly it takes 25 s
        server.wait()


def bucket_of(environment: Mapping[str, str], name: str) -> S3Store:
    """A bucket of the server to which the environment leads."""
    return S3Store(
        name,
        endpoint=environment["AWS_ENDPOINT_URL"],
        region="us-east-1",
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
