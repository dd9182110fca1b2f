"""Addresses of stores that can't be right, or lead nowhere."""

from __future__ import annotations

import socket

import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.object_store import settings_for
from ddptrain.storage.store import Location, StoreUnreachable, open_store


@pytest.mark.parametrize("url", ["s3://me:hush@box/x", "gs://hush@box", "abfs://me:hush@acc/dogs"])
def test_credentials_in_an_address_are_refused_before_they_are_sent_anywhere(url: str) -> None:
    with pytest.raises(UsageError, match=r"<left out>@.* contains credentials.*params\.source_options") as caught:
        open_store(Location(url))
    assert "hush" not in str(caught.value)


def test_a_bucket_whose_name_is_none_has_no_region() -> None:
    bucket = "no bucket:x"
    assert (
        settings_for(Location(f"s3://{bucket}/p", {"skip_signature": True}), "s3", bucket, 1.0)[1]["region"]
        == "us-east-1"
    )


def test_a_server_that_is_down_is_no_mistake_in_the_options() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StoreUnreachable, match=rf"ftp://<left out>@{where}/x can't be opened: .*refused"):
            open_store(Location(f"ftp://me:hush@{where}/x"))
