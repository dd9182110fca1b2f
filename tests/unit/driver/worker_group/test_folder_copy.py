"""The pieces in which the files of a folder are sent to a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.driver.worker_group import folder_copy
from ddptrain.file_ops import sha256
from ddptrain.worker import driver_calls


class Client:
    """A client whose worker writes below /scratch."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def run(self, *call: Any, workers: list[str]) -> dict[str, str]:
        self.sent.append((*call, workers))
        return dict.fromkeys(workers, f"/scratch/{call[2]}")


def test_each_file_is_sent_in_pieces_and_an_empty_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_copy, "READ_LIMIT_BYTES", 4)
    contents = {"empty": b"", "short": b"abc", "whole": b"abcd", "long": b"abcdefghi"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    client: Any = Client()
    copy = f"brought-{sha256(str(tmp_path).encode()).hexdigest()[:8]}-{tmp_path.name}"
    assert folder_copy.copy_folder(client, "r", "w", tmp_path, list(contents)) == f"/scratch/{copy}"
    expected = [("empty", 0, b""), ("short", 0, b"abc"), ("whole", 0, b"abcd")]
    expected += [("long", 0, b"abcd"), ("long", 4, b"efgh"), ("long", 8, b"i")]
    assert client.sent == [
        (driver_calls.write_spool, "r", f"{copy}/{name}", offset, data, ["w"]) for name, offset, data in expected
    ]


def test_folders_of_the_same_name_have_copies_of_their_own(tmp_path: Path) -> None:
    copies = []
    for parent in ("a", "b"):
        folder = tmp_path / parent / "step-1"
        folder.mkdir(parents=True)
        (folder / "f").write_bytes(b"x")
        client: Any = Client()
        copies.append(folder_copy.copy_folder(client, "r", "w", folder, ["f"]))
    assert copies[0] != copies[1] and all(copy.endswith("-step-1") for copy in copies)
