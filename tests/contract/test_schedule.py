"""`ddptrain schedule` with stand-ins for crontab and systemctl: what is installed, and what can be removed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.contract.conftest import Project

CONFIG = {"workload": "petnames", "cluster": {"ranks": 1}, "retrain": {"model": "names"}}
CRONTAB = """#!/bin/sh
if [ "$1" = - ]; then exec cat > "$CRONTAB"; fi
cat "$CRONTAB" 2>/dev/null || { echo "no crontab for me" >&2; exit 1; }
"""


@pytest.fixture
def env(project: Project) -> dict[str, str]:
    """An environment with programs that only note what they get."""
    for name, text in (("crontab", CRONTAB), ("systemctl", "#!/bin/sh\n")):
        project.write(f"bin/{name}", text).chmod(0o755)
    project.write("names.yaml", json.dumps(CONFIG))
    folders = {f"XDG_{name}_HOME": str(project.folder / name) for name in ("CONFIG", "STATE")}
    path = f"{project.folder / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "CRONTAB": str(project.folder / "crontab.txt"), **folders}


def listed(project: Project, env: dict[str, str]) -> list[str]:
    return [entry["name"] for entry in json.loads(project("schedule", "list", "--json", env=env, rc=0).stdout)]


def test_schedule_is_removed_after_the_time_zone_of_the_host_has_changed(project: Project, env: dict[str, str]) -> None:
    Path(env["CRONTAB"]).write_text("0 1 * * * mine\n")
    project("schedule", "add", "names.yaml", "--at", "0 3 * * *", "--as", "cron", "--install", env=env, rc=0)
    (script,) = (project.folder / "CONFIG" / "ddptrain" / "schedules").glob("*.sh")
    text = script.read_text()
    script.write_text(re.sub(r'"at":"0 3 [*] [*] [*] [^"]*"', '"at":"0 3 * * * Asia/Tokyo"', text))
    assert script.read_text() != text
    assert listed(project, env) == ["names"]
    project("schedule", "remove", "names", env=env, rc=0)
    assert (listed(project, env), script.exists()) == ([], False)
    assert Path(env["CRONTAB"]).read_text() == "0 1 * * * mine\n"


def test_a_timer_of_the_system_has_another_name_than_that_of_the_user(project: Project, env: dict[str, str]) -> None:
    add = ("schedule", "add", "names.yaml", "--at", "0 3 * * *", "--as", "systemd", "--install")
    project(*add, env=env, rc=0)
    units = project.folder / "CONFIG" / "systemd" / "user"
    before = {path: path.read_text() for path in units.iterdir()}
    assert len(before) == 2
    refused = project(*add, "--system", env=env, rc=2)
    assert "there is a schedule names already" in refused.stderr
    assert {path: path.read_text() for path in units.iterdir()} == before
    project("schedule", "remove", "names", env=env, rc=0)
    assert (listed(project, env), list(units.iterdir())) == ([], [])
