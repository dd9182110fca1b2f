from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddptrain.redact import LEFT_OUT
from ddptrain.results import provenance
from ddptrain.results.provenance import git_state, installed_versions, without_secrets
from ddptrain.results.run_record import EnvironmentValue


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


def test_a_folder_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_a_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
    monkeypatch.undo()


def test_versions_name_python_and_torch_without_importing_torch() -> None:
    versions = installed_versions()
    assert versions["python"].startswith("3.")
    assert "torch" in versions


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
