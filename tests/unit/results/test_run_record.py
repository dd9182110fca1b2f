"""The record of a run, and where its code comes from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddptrain.redact import LEFT_OUT
from ddptrain.results import provenance
from ddptrain.results.provenance import (
    git_diff,
    git_state,
    without_secrets,
    without_secrets_in_diff,
)
from ddptrain.results.run_record import (
    AttemptRecord,
    BestRecord,
    DriverRecord,
    EnvironmentValue,
    FailureRecord,
    GitRecord,
    RankRecord,
    RecordError,
    RunRecord,
    ascii_json,
)

# --- run record ---


def full_record() -> RunRecord:
    ranks = (RankRecord(0, 0, 0, "h", 11, None, 0), RankRecord(1, 1, 0, "h", 12, "1", -9))
    return RunRecord(
        run_id="r",
        name="n",
        workload="petnames",
        status="failed",
        exit_code=1,
        started_at="2025-01-01T00:00:00.000Z",
        ended_at="2025-01-01T00:00:01.000Z",
        duration_s=1.0,
        world_size=2,
        attempts=(AttemptRecord(1, "s", "e", 2, "failed", ranks),),
        failure=FailureRecord(1, "h", "signal", "", "killed by SIGKILL", "", "logs/rank-1.log"),
        git=GitRecord("abc", dirty=True),
        versions={"python": "3.11"},
        rank_environment={"OMP_NUM_THREADS": EnvironmentValue("1", "user")},
        driver=DriverRecord(5, "h"),
        last_metrics={"train/loss": 1.5},
        best=BestRecord("val/loss", "min", 1.25, 10),
        checkpoints=("step-20", "step-10"),
    )


def test_a_record_comes_back_as_it_was_written() -> None:
    assert RunRecord.from_json(full_record().to_json()) == full_record()


def test_a_record_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    data = json.loads(full_record().to_json())
    data |= {"schema": 9, "colour": "red", "status": "paused"}
    data["failure"]["blame"] = {}
    del data["versions"], data["driver"]
    record = RunRecord.from_json(json.dumps(data))
    assert (record.schema, record.status, record.versions) == (9, "paused", {})
    assert record.failure == full_record().failure


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"run_id": "r", "status": 3}', b"\xff\xfe{", b"[" * 100_000],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    with pytest.raises(RecordError):
        RunRecord.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoints", "step-1"),
        ("world_size", "many"),
        ("duration_s", [10**400]),
    ],
)
def test_a_record_with_a_field_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RecordError, match=rf"^{field}"):
        RunRecord.from_json(json.dumps({"run_id": "r", "status": "failed", field: value}))


def test_json_is_ascii_in_one_line_or_indented() -> None:
    assert ascii_json({"a": [1.5, float("nan"), None, True]}) == b'{"a":[1.5,null,null,true]}'
    assert ascii_json({"a": "\u2028", "b": 1}) == b'{"a":"\\u2028","b":1}'
    assert ascii_json({"a": "\ud800"}, indent=2) == b'{\n  "a": "\\ud800"\n}'
    assert ascii_json({"a": 1}, indent=2) == b'{\n  "a": 1\n}'


# --- provenance ---


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_commit_and_changes_of_the_checkout_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_GIT_TIMEOUT_S", 60.0)  # a run can do without it, this test can't
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    folder = tmp_path / "sub"
    folder.mkdir()
    state = git_state(folder)
    assert state is not None
    assert (state.commit, state.dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "a").write_text("2")
    changed = git_state(folder)
    assert changed is not None and changed.dirty


def commit_then_change(folder: Path, before: dict[str, str], after: dict[str, str]) -> None:
    git(folder, "init", "-q")
    for name, text in before.items():
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "a")
    for name, text in after.items():
        (folder / name).write_text(text)


def test_changes_of_tracked_files_are_told_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_GIT_TIMEOUT_S", 60.0)
    before = {"train.py": "rate = 1\n", ".env": "A=1\n"}
    after = {"train.py": 'rate = 2\nnote = "hunter2 is it"\n', ".env": "WORDS=geheim\n", "new.py": "unseen = 1\n"}
    commit_then_change(tmp_path, before, after)
    sub = tmp_path / "sub"
    sub.mkdir()
    text = git_diff(sub, ["hunter2"])
    assert "-rate = 1\n+rate = 2\n" in text and 'note = "<left out> is it"' in text
    assert "diff --git a/.env b/.env\n<left out>\ndiff --git" in text
    assert not any(word in text for word in ("hunter2", "geheim", "unseen"))


def test_large_diff_is_cut_at_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_GIT_TIMEOUT_S", 60.0)
    commit_then_change(tmp_path, {"a": ""}, {"a": "0123456789\n" * 100_000})
    text = git_diff(tmp_path)
    assert 190_000 < len(text) < 200_100
    assert text.endswith("\n+0123456789\n... (the rest is left out)\n")


def test_diff_starts_no_program_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_GIT_TIMEOUT_S", 60.0)
    commit_then_change(tmp_path, {"a.txt": "1\n", ".gitattributes": "*.txt diff=own\n"}, {"a.txt": "2\n"})
    for key in ("diff.external", "diff.own.command", "diff.own.textconv"):
        git(tmp_path, "config", key, f"touch {tmp_path}/called; cat")
    assert "-1\n+2\n" in git_diff(tmp_path)
    assert not (tmp_path / "called").exists()


def test_without_a_checkout_or_git_there_is_no_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_diff(tmp_path) == ""
    commit_then_change(tmp_path, {"a": "1"}, {"a": "2"})
    monkeypatch.setenv("PATH", "")
    assert git_diff(tmp_path) == ""


@pytest.mark.parametrize(
    "line",
    [
        "+  api_key: hunter2",
        "-  - password: 'hunter2'",
        "-API_KEY = 'hunter2'",
        '+os.environ["API_KEY"] = "hunter2"',
        '+os.environ.setdefault("API_KEY", "hunter2")',
        ' connect("https://me:hunter2@host/")',
        "+hf = 'hf_hunter2hunter2hunter2hunter2hunter2'",
        "+-----BEGIN PRIVATE KEY-----\n+hunter2\n+-----END PRIVATE KEY-----",
    ],
)
def test_secrets_in_a_diff_are_left_out(line: str) -> None:
    text = without_secrets_in_diff(f"diff --git a/a.py b/a.py\n{line}\n+kept = 1\n")
    assert "hunter2" not in text and LEFT_OUT in text
    assert text.endswith("\n+kept = 1\n")


def test_code_in_a_diff_is_kept() -> None:
    text = "diff --git a/a.py b/a.py\n+for key in sorted(rows, key=len):\n-    tokens = split(text)\n+    pass\n"
    assert without_secrets_in_diff(text) == text


def test_secrets_of_the_environment_are_left_out() -> None:
    given = {
        "WANDB_API_KEY": EnvironmentValue("abc", "user"),
        "PROXY": EnvironmentValue("http://me:pw@host/", "user"),
        "OMP_NUM_THREADS": EnvironmentValue("1", "ddptrain"),
    }
    kept = without_secrets(given)
    assert kept["WANDB_API_KEY"].value == LEFT_OUT
    assert "pw" not in kept["PROXY"].value
    assert kept["OMP_NUM_THREADS"] == given["OMP_NUM_THREADS"]


def test_files_after_a_secret_one_are_shown() -> None:
    text = "diff --git a/.env b/.env\n+A=1\ndiff --git a/a.py b/a.py\n+a = 1\n"
    assert without_secrets_in_diff(text) == (
        f"diff --git a/.env b/.env\n{LEFT_OUT}\ndiff --git a/a.py b/a.py\n+a = 1\n"
    )
