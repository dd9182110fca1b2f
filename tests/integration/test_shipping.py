"""A project trains on workers that don't see its folder; they get a copy of its code, and an edit is seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished
from tests.servers.dask_cluster import DaskCluster, up_cluster

__all__ = ["up_cluster"]

TRAIN = """
import os
from helpers.words import word


def train(ctx):
    print("says", word(), open("data.txt").read(), os.path.exists("notes.secret"))
"""


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_code_goes_along_and_an_edit_is_seen(run_cli: Cli, up_cluster: DaskCluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "helpers").mkdir(parents=True)
    (project / "helpers" / "words.py").write_text("def word():\n    return 'first'\n")
    (project / "train.py").write_text(TRAIN)
    (project / "data.txt").write_text("data")
    (project / "notes.secret").write_text("stays at home")
    (project / ".ddptrainignore").write_text("*.secret\n")
    (project / "c.yaml").write_text(json.dumps({"workload": "train:train", "cluster": {"ranks": 2}}))
    hide = f'mount -t tmpfs none {project} && exec "$@"'  # to the worker the project's folder is empty
    up_cluster.add_worker("unshare", "--mount", "bash", "-c", hide, "-", scratch=tmp_path / "scratch")

    def train(run_id: str, *more: str) -> Finished:
        where = ("--cluster", up_cluster.address, "--run-id", run_id)
        return run_cli("train", project / "c.yaml", *where, *more, cwd=project)

    def code(run_id: str) -> dict[str, Any]:
        record = json.loads((project / "runs" / run_id / "run.json").read_text())
        found: dict[str, Any] = record["code"]
        return found

    first = train("first")
    assert first.rc == 0, first.stderr
    assert "[rank 1] says first data False" in first.stdout
    assert "uploading" in first.stderr and "to host" in first.stderr
    again = train("again")
    assert again.rc == 0
    assert code("first") == code("again")
    assert (code("first")["files"], code("first")["folder"]) == (5, str(project))
    (project / "helpers" / "words.py").write_text("def word():\n    return 'second'\n")
    assert "[rank 0] says second data False" in train("edited").stdout
    assert code("edited")["hash"] != code("first")["hash"]
    (project / "train.py").write_text("import no_such_package\n" + TRAIN)
    lacking = train("lacking")
    assert lacking.rc == 1 and "failed first: ModuleNotFoundError: No module named 'no_such_package'" in lacking.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_script_named_by_its_whole_path_goes_along_and_one_that_would_not_is_told(
    run_cli: Cli, up_cluster: DaskCluster, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "beside.py").write_text("WORD = 'beside'\n")
    (project / "script.py").write_text("import beside, json\nprint('says', beside.WORD, __file__)\n")
    config = {"workload": {"script": str(project / "script.py")}, "cluster": {"ranks": 1}}
    (project / "c.yaml").write_text(json.dumps(config))
    hide = f'mount -t tmpfs none {project} && exec "$@"'
    up_cluster.add_worker("unshare", "--mount", "bash", "-c", hide, "-", scratch=tmp_path / "scratch")
    where = ("train", project / "c.yaml", "--cluster", up_cluster.address)
    ended = run_cli(*where, cwd=project)
    assert ended.rc == 0, ended.stderr
    assert f"says beside {tmp_path}/scratch/" in ended.stdout
    (project / ".ddptrainignore").write_text("script.py\n")
    left_out = run_cli(*where, cwd=project)
    assert left_out.rc == 2 and "script.py would not be uploaded" in left_out.stderr
