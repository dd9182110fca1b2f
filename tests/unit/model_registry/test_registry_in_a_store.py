"""The registry in a real S3 server: concurrent promotions, copies for readers, a store without conditional writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.model_registry.records import RegistryDamaged, VersionRecord
from ddptrain.model_registry.reference import parse_reference
from ddptrain.model_registry.registry import ModelRegistry, open_version
from tests.servers.s3server import s3_server
from tests.servers.seaweed import seaweed

PROMOTIONS = 10
_PROMOTER = """
import sys
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry

url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
registry = ModelRegistry.open(url)
for each in range(count):
    record = VersionRecord("", 0, "", f"{name}-{each}", "petnames", 1, {}, ())
    version = registry.add_version("names", {"weights": f"{name} {each}".encode()}, record)
    registry.promote("names", version.version)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("seaweed"), "bucket") as found:
        yield found


@pytest.fixture
def url(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://bucket/{tmp_path.name}"


def test_promotions_of_several_processes_are_one_history(url: str) -> None:
    command = [sys.executable, "-c", _PROMOTER, url]
    processes = [subprocess.Popen([*command, name, str(PROMOTIONS)]) for name in ("a", "b", "c")]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    registry = ModelRegistry.open(url)
    versions = registry.versions("names")
    assert len(versions) == 3 * PROMOTIONS == len({version.run_id for version in versions})
    changes = registry.history("names")
    assert [change.number for change in changes] == list(range(1, 6 * PROMOTIONS + 1))
    champion = None
    for change in changes:  # each entry follows from the one before it: no promotion was lost
        if change.action == "promoted":
            assert change.aliases["champion"] == change.version
            assert change.aliases.get("previous") == champion
            champion = change.version
    for version in versions:
        registry.verify(version)


def test_reader_gets_a_verified_copy(url: str, tmp_path: Path) -> None:
    registry = ModelRegistry.open(url)
    record = VersionRecord("", 0, "", "run", "petnames", 1, {"val/loss": 2.0}, ())
    registry.add_version("names", {"a/weights": b"1234", "run.json": b"{}"}, record)
    registry.promote("names", 1)
    champion = registry.resolve(parse_reference("names@champion"))
    folder = open_version(registry, champion)
    assert folder.is_relative_to(tmp_path / "cache") and (folder / "a/weights").read_bytes() == b"1234"
    (folder / "a/weights").write_bytes(b"1235")  # a damaged copy is fetched again
    assert (open_version(registry, champion) / "a/weights").read_bytes() == b"1234"

    (folder / "a/weights").unlink()
    registry.folder.write("names/versions/1/a/weights", b"1235")
    with pytest.raises(RegistryDamaged, match=r"s3://bucket/.*/names/versions/1/a/weights has another SHA-256"):
        open_version(registry, champion)
    assert not (folder / "a/weights").exists()
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith(".tmp")] == []


def test_store_that_ignores_conditions_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as server:
        (server.buckets / "bucket").mkdir()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        registry = ModelRegistry.open("s3://bucket/models")
        record = VersionRecord("", 0, "", "run", "petnames", 1, {}, ())
        with pytest.raises(UsageError, match="no conditional writes"):
            registry.add_version("names", {"weights": b"1"}, record)
        assert registry.models() == []
        assert json.dumps(sorted(registry.folder.files())) == "[]"
