"""What must be equal in a warm process and in the command that it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddptrain.cli.warm import conditions as module
from ddptrain.cli.warm.conditions import conditions, process_status

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")


def test_same_process_has_the_same_conditions_also_as_json() -> None:
    found = conditions({"HOME": "/nowhere", "TERM": "xterm"})
    assert json.loads(json.dumps(found)) == conditions({"HOME": "/nowhere", "TERM": "dumb", "PWD": "/x"})


@pytest.mark.parametrize("name", ["TZ", "LC_ALL", "PYTHONPATH", "LD_PRELOAD", "DASK_LOGGING", "XDG_CONFIG_HOME"])
def test_variable_that_counts_at_the_start_of_a_program_is_a_difference(name: str) -> None:
    before, after = conditions({"HOME": "/nowhere"}), conditions({"HOME": "/nowhere", name: "x"})
    assert [key for key in before if before[key] != after[key]] == ["environment"]


def test_changed_code_is_a_difference_and_byte_code_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub" / "__pycache__").mkdir(parents=True)
    code = tmp_path / "sub" / "a.py"
    code.write_text("x = 1")
    os.utime(code, ns=(0, 10**9))
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    before = conditions({})
    (tmp_path / "sub" / "__pycache__" / "a.pyc").write_text("")
    assert conditions({}) == before
    os.utime(code, ns=(0, 2 * 10**9))
    assert conditions({})["code"] != before["code"]


def test_dask_configuration_of_the_user_is_a_difference(tmp_path: Path) -> None:
    before = conditions({"HOME": str(tmp_path)})["dask"]
    (tmp_path / ".config" / "dask").mkdir(parents=True)
    (tmp_path / ".config" / "dask" / "a.yaml").write_text("a: 1")
    assert conditions({"HOME": str(tmp_path)})["dask"] != before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0::/user.slice/session-3.scope", "0::/user.slice/session-c12.scope", True),
        ("0::/user.slice/session-3.scope\n", "0::/user.slice/vte-spawn-0a-1f.scope\n", True),
        ("0::/user.slice/session-3.scope", "0::/user.slice/run-u7.scope", False),
        ("0::/slurm/job_1", "0::/slurm/job_2", False),
    ],
)
def test_logins_of_a_user_may_differ_and_other_cgroups_may_not(
    one: str, other: str, *, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for text in (one, other):
        monkeypatch.setattr(module, "_read", lambda name, text=text: text if name == "cgroup" else "")
        found.append(conditions({})["cgroup"])
    assert (found[0] == found[1]) is same


def test_status_has_the_umask_as_octal_digits() -> None:
    before = os.umask(0o027)
    try:
        assert int(process_status()["Umask"], 8) == 0o027
    finally:
        os.umask(before)
