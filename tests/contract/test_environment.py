"""`code.environment`: the packages of the ranks come from uv.lock or a requirements file, whatever the host has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.contract.conftest import Project, pids_of
from tests.support.command import wait_until
from tests.support.environments import lock_project, make_environment, make_source, make_wheel

SAYS = """
    import sys


    def train(ctx):
        import wordlib
        print("says", wordlib.VERSION, sys.prefix, flush=True)
"""


@pytest.fixture
def wheels(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with two versions of a package; the caches are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.folder / "cache"))
    for version in ("1.0", "2.0"):
        make_wheel(project.folder / "wheels", "wordlib", version, f"VERSION = {version!r}\n")
    return project.folder / "wheels"


def installed(project: Project) -> list[Path]:
    return [path.parent for path in project.folder.glob("cache/ddptrain/environments/*/pyvenv.cfg")]


def test_ranks_have_the_packages_of_the_lock_which_are_installed_once(project: Project, wheels: Path) -> None:
    lock_project(project.folder, wheels, "wordlib<2")
    config = project.function(SAYS, cluster={"ranks": 2, "gpus": 0}, code={"environment": "uv"})
    first = project("train", config, rc=0)
    (environment,) = installed(project)
    assert f"[rank 1] says 1.0 {environment}" in first.stdout
    assert "installing the environment" in first.stderr
    assert environment.parent.stat().st_mode & 0o077 == 0
    again = project("train", config, rc=0)
    assert f"[rank 0] says 1.0 {environment}" in again.stdout
    assert "installing" not in again.stderr


@pytest.mark.long
def test_requirements_file_is_taken_and_an_edit_makes_another_environment(project: Project, wheels: Path) -> None:
    config = project.function(SAYS, cluster={"ranks": 1, "gpus": 0}, code={"environment": "pinned.txt"})
    for version in ("1.0", "2.0"):
        project.write("pinned.txt", f"--no-index\n--find-links {wheels}\nwordlib=={version}\n")
        assert f"says {version} " in project("train", config, rc=0).stdout
    assert len(installed(project)) == 2


def test_lock_that_does_not_fit_is_an_error_of_the_configuration(project: Project, wheels: Path) -> None:
    lock_project(project.folder, wheels, "wordlib<2")
    edited = (project.folder / "pyproject.toml").read_text().replace("wordlib<2", "wordlib>=2")
    project.write("pyproject.toml", edited)
    config = project.function(SAYS, cluster={"ranks": 1, "gpus": 0}, code={"environment": "uv"})
    failed = project("train", config, rc=2)
    assert "uv.lock does not fit pyproject.toml" in failed.stderr and "uv lock" in failed.stderr
    assert installed(project) == []


def test_what_uv_can_not_install_is_the_root_cause(project: Project, wheels: Path) -> None:
    lock_project(project.folder, wheels, "wordlib<2")
    (wheels / "wordlib-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    config = project.function(SAYS, cluster={"ranks": 1, "gpus": 0}, code={"environment": "uv"})
    failed = project("train", config, rc=4)
    assert f"on host {os.uname().nodename}: `uv sync` failed" in failed.stderr and "wordlib" in failed.stderr
    assert project.record()["failure"]["message"].count("wordlib")
    assert installed(project) == []


def test_interrupted_installation_ends_with_what_it_has_started(project: Project, wheels: Path) -> None:
    mark = f"sleep 9{os.getpid()}"
    make_source(wheels, "slowlib", "1.0", f"import os; os.system({mark!r})")
    lock_project(project.folder, wheels, "slowlib")
    config = project.function(SAYS, cluster={"ranks": 1, "gpus": 0}, code={"environment": "uv"})
    running = project.start("train", config)
    wait_until(lambda: pids_of(mark), "the build")
    running.popen.send_signal(signal.SIGINT)
    assert running.finish().rc == 130
    wait_until(lambda: not pids_of(mark), "the end of the build")
    assert installed(project) == []


def test_host_without_uv_is_told_what_to_install(project: Project, wheels: Path) -> None:
    lock_project(project.folder, wheels, "wordlib<2")
    config = project.function(SAYS, cluster={"ranks": 1, "gpus": 0}, code={"environment": "uv"})
    python = make_environment(project.folder / "bare")
    failed = project.cli("train", config, program=(str(python), "-m", "ddptrain"), env={"PATH": "/usr/bin:/bin"})
    assert failed.rc == 4 and "pip install uv" in failed.stderr


@pytest.mark.parametrize(
    ("environment", "text", "expected"),
    [
        ("uv", "", "no uv.lock"),
        ("absent.txt", "", "no such file"),
        ("loose.txt", "wordlib==1.0\nothers>=2\n", "loose.txt:2"),
    ],
)
def test_files_that_can_not_be_used_are_named_before_anything_starts(
    project: Project, environment: str, text: str, expected: str
) -> None:
    project.write("loose.txt", text)
    config = project.function("def train(ctx): pass", code={"environment": environment, "folder": "."})
    failed = project("train", config, "--dry-run", rc=2)
    assert expected in failed.stderr and "code.environment" in failed.stderr
    assert project.run_directories() == []
