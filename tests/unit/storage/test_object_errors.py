"""What a failed request to an object store says: the place, the value that may be wrong, and what to set."""

from __future__ import annotations

import pytest

from ddptrain.storage.object_errors import store_error
from ddptrain.storage.store import Location, StoreForbidden, StoreUnreachable

REFUSED = 'Generic S3 error: HTTP error: request error, after 4 retries, kind: Connect, error: "Connection refused"'
REDIRECT = (
    "Generic S3 error: Received redirect without LOCATION, this normally indicates an incorrectly configured region"
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def said(text: str, **options: str) -> str:
    error = store_error(Location.of("s3://pets/dogs", options), "listed", "", OSError(text), 30.0)
    assert isinstance(error, StoreUnreachable | StoreForbidden)
    return str(error)


def test_closed_port_names_the_endpoint_without_its_password() -> None:
    start = "s3://pets/dogs can't be listed: no connection (Connection refused), tried 5 times: "
    assert said(REFUSED) == f"{start}is its endpoint right, and the server up?"
    assert said(REFUSED, endpoint_url="http://h:9") == f"{start}is its endpoint, http://h:9, right, and the server up?"
    assert "secret" not in said(REFUSED, endpoint_url="http://me:secret@h:9")


def test_endpoint_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert said(REFUSED).endswith("is its endpoint, http://minio:9000, right, and the server up?")


def test_wrong_region_names_the_region_that_was_asked() -> None:
    wrong = "s3://pets/dogs is in another region than"
    assert said(REDIRECT, region="eu-west-1") == f"{wrong} eu-west-1: set params.source_options.region"
    assert said(REDIRECT) == f"{wrong} us-east-1, the default: set params.source_options.region"
