"""wandb's transaction log: what is written is read, also by wandb itself; what is torn ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wandb.proto import wandb_internal_pb2

from ddptrain.tracking.wandb.internals import parse_record
from ddptrain.tracking.wandb.transaction_log import (
    LoggedFile,
    SeparateRun,
    is_empty,
    records,
    rewrite,
    staged_files,
    write,
)

RECORD: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]


def write_records(log: Path, *made: Any) -> None:
    write(log, [record.SerializeToString() for record in made])


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 100, 32_744, 32_747, 32_754, 32_755, 32_768, 70_000]), max_size=6))
def test_records_of_any_size_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    log = tmp_path_factory.mktemp("log") / "run-w1.wandb"
    written = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    write(log, written)
    assert list(records(log)) == written


def test_header_and_first_piece_have_the_known_bytes(tmp_path: Path) -> None:
    write(tmp_path / "log", [b"abc"])
    # ":W&B", magic number, version; crc32 of type and data, length 3, type 1 (a whole record), data.
    assert (tmp_path / "log").read_bytes().hex() == "3a572642e1be00" + "a9209d53" + "030001616263"


def test_log_ends_before_the_first_damaged_record(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write(log, [b"one", b"two", b"three"])
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])
    assert list(records(log)) == [b"one", b"two"]
    log.write_bytes(whole.replace(b"two", b"tvo"))
    assert list(records(log)) == [b"one"]


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a transaction log of wandb"):
        list(records(tmp_path / "log"))
    assert is_empty(tmp_path / "log")


def artifact(kind: str, *paths: str, **entry: Any) -> Any:
    contents = [{"path": Path(path).name, "digest": "d", "local_path": path, **entry} for path in paths]
    return RECORD(artifact={"type": kind, "name": kind, "run_id": "w1", "manifest": {"contents": contents}})


def test_log_without_a_run_is_empty(tmp_path: Path) -> None:
    write_records(tmp_path / "log", artifact("model", "/a"))
    assert is_empty(tmp_path / "log")
    write_records(tmp_path / "log", RECORD(run={"run_id": "w1"}))
    assert not is_empty(tmp_path / "log")


def test_files_of_artifacts_are_listed(tmp_path: Path) -> None:
    listed = RECORD(artifact={"type": "dataset", "manifest": {"manifest_file_path": "/list"}})
    other = artifact("dataset", "/b", extra=[{"key": "algorithm", "value_json": '"sha"'}])
    write_records(tmp_path / "log", artifact("model", "/a"), other, listed)
    assert staged_files(tmp_path / "log") == [
        LoggedFile("/a", "model", "d"),
        LoggedFile("/b", "dataset", ""),
        LoggedFile("/list", "", "", is_list=True),
    ]


def test_rewritten_log_has_new_paths_and_no_artifact_that_lacks_a_file(tmp_path: Path) -> None:
    log, new = tmp_path / "log", tmp_path / "new"
    write_records(
        log,
        RECORD(run={"run_id": "w1", "display_name": "old"}),
        artifact("model", "/a", "/b"),
        artifact("table", "/c"),
        RECORD(exit={"exit_code": 7}),
    )
    moved = {"/a": Path("/new/a"), "/b": None, "/c": Path("/new/c")}
    rewrite(log, new, lambda file: moved[file.path], exit_code=1, separate=SeparateRun("w1-rank_1", "rank_1", "w1"))
    run, table, end = (parse_record(data) for data in records(new))
    assert (run.run.run_id, run.run.display_name, run.run.run_group) == ("w1-rank_1", "rank_1", "w1")
    assert [entry.local_path for entry in table.artifact.manifest.contents] == ["/new/c"]
    assert (table.artifact.run_id, end.exit.exit_code) == ("w1-rank_1", 1)
    rewrite(log, new, lambda file: Path(file.path))
    assert list(records(new)) == list(records(log)), "nothing has to be changed"
