"""What is used of the configuration of another user's run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddptrain.results.recorded_config import is_own_record, of_the_model

NOBODY = 65534
EVIL = {
    "workload": "petnames",
    "evaluate": "runs.evil.code:score",
    "params": {"source": "dask://x", "source_options": {"client": "tcp://evil:8786"}},
    "env": {"LD_PRELOAD": "/tmp/evil.so"},
    "code": {"folder": "/home"},
    "cluster": {"backend": "ssh", "ranks": 2, "ssh": {"hosts": ["a"]}},
}


def test_no_program_variable_host_or_store_of_another_user_is_used() -> None:
    kept = {"workload": "petnames", "params": {"source": "dask://x"}, "cluster": {"ranks": 2}}
    assert of_the_model(EVIL) == kept
    assert of_the_model({"cluster": "x", "params": 1}) == {}


def test_file_in_a_run_of_this_user_is_his_own(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert is_own_record(tmp_path / "config.yaml")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("given", [".", "config.yaml"])
def test_file_or_folder_of_another_user_is_not(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.yaml").touch()
    os.chown(tmp_path / given, NOBODY, NOBODY)
    assert not is_own_record(tmp_path / "config.yaml")


def test_copy_of_a_run_in_a_store_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = tmp_path / "ddptrain" / "runs" / "store" / "run-1"
    copy.mkdir(parents=True)
    (copy / "config.yaml").touch()
    assert not is_own_record(copy / "config.yaml")
