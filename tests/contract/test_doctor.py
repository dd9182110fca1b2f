"""`ddptrain doctor`: this machine, and all hosts of a cluster."""

from __future__ import annotations

import json

from tests.contract.conftest import Project


def test_hosts_of_a_cluster_are_checked_and_measured(project: Project, shared_cluster: str) -> None:
    done = project("doctor", "--cluster", shared_cluster, "--json")
    report = json.loads(done.stdout)
    bad = [check for check in report["checks"] if check["result"] == "bad"]
    assert done.rc == (4 if bad else 0) and report["ok"] == (not bad)  # this machine may have a full disk
    subjects = {check["subject"] for check in report["checks"]}
    assert {"host", "memory", "disk", "speed", "all-reduce"} <= subjects, done
    assert not {"answer", "reading"} & subjects and not (project.folder / "runs").exists()


def test_cluster_that_does_not_exist_is_named(project: Project) -> None:
    done = project("doctor", "--cluster", "nowhere", rc=2)
    assert "nowhere" in done.stderr


def test_this_machine_is_checked(project: Project) -> None:
    done = project("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.rc == (0 if report["ok"] else 4)
    assert {"Python", "torch", "gloo", "memory", "disk", "ports"} <= {check["subject"] for check in report["checks"]}
