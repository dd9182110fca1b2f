"""A configuration file of a store, as the best.yaml of a sweep, is copied to this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.remote import config_copy
from ddptrain.storage.remote_folder import RemoteFolder


class Folder:
    """A folder of a store with one file."""

    def read(self, name: str, most: int) -> bytes | None:
        assert most == 1 << 20
        return b"name: best\n" if name == "best.yaml" else None


def test_file_is_copied_into_a_folder_of_its_own_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_folder(url: str) -> Folder:
        opened.append(url)
        return Folder()

    monkeypatch.setattr(RemoteFolder, "open", open_folder)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache")
    first, second = (config_copy.fetch_config(f"s3://bucket/runs/{run}/best.yaml") for run in "ab")
    assert opened == ["s3://bucket/runs/a", "s3://bucket/runs/b"]
    assert first.name == second.name == "best.yaml" and first != second
    assert first.read_text() == second.read_text() == "name: best\n"
    assert first.parent.parent == tmp_path / "cache" / "configs" and first.parent.stat().st_mode & 0o777 == 0o700
    assert config_copy.fetch_config("s3://bucket/runs/a/best.yaml") == first
    for missing in ("s3://bucket/runs/a/other.yaml", "s3://bucket/runs/a/"):
        with pytest.raises(UsageError, match="there is no such file"):
            config_copy.fetch_config(missing)
