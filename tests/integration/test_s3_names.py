"""Pet names from a real S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.names import load_names
from ddptrain.workloads.petnames.params import PetnamesParams
from tests.servers.s3server import s3_server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options that reach a server with one bucket, `pets`, that holds names.txt."""
    with s3_server(tmp_path) as server:
        (server.buckets / "pets").mkdir()
        (server.buckets / "pets" / "names.txt").write_text("rex\nbella\nN0t a name\n")
        yield server.options


def load(url: str, options: dict[str, Any]) -> tuple[str, ...]:
    return load_names(PetnamesParams(names=url, names_options=options)).names


def test_names_are_read_from_a_bucket(s3: dict[str, Any]) -> None:
    assert load("s3://pets/names.txt", s3) == ("rex", "bella")


def test_missing_object_is_a_clear_error(s3: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"can't read params\.names 's3://pets/none\.txt'"):
        load("s3://pets/none.txt", s3)
