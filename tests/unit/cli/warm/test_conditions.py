"""What must be equal in a warm process and in the command that it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddptrain.cli.warm.conditions import conditions, process_status

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")


def test_same_process_has_the_same_conditions_also_as_json() -> None:
    found = conditions({"HOME": "/nowhere", "TERM": "xterm"})
    assert json.loads(json.dumps(found)) == conditions({"HOME": "/nowhere", "TERM": "dumb", "PWD": "/x"})


@pytest.mark.parametrize("name", ["TZ", "LC_ALL", "PYTHONPATH", "LD_PRELOAD", "DASK_LOGGING", "XDG_CONFIG_HOME"])
def test_variable_that_counts_at_the_start_of_a_program_is_a_difference(name: str) -> None:
    before, after = conditions({"HOME": "/nowhere"}), conditions({"HOME": "/nowhere", name: "x"})
    assert [key for key in before if before[key] != after[key]] == ["environment"]


def test_dask_configuration_of_the_user_is_a_difference(tmp_path: Path) -> None:
    before = conditions({"HOME": str(tmp_path)})["dask"]
    (tmp_path / ".config" / "dask").mkdir(parents=True)
    (tmp_path / ".config" / "dask" / "a.yaml").write_text("a: 1")
    assert conditions({"HOME": str(tmp_path)})["dask"] != before


def test_status_has_the_umask_as_octal_digits() -> None:
    before = os.umask(0o027)
    try:
        assert int(process_status()["Umask"], 8) == 0o027
    finally:
        os.umask(before)
