"""What a scheduler starts: absolute paths, the environment without secrets, and the file with secret variables."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from ddptrain.config.load import load_config
from ddptrain.errors import UsageError
from ddptrain.schedule.due_times import parse_schedule
from ddptrain.schedule.job import Job, checked_name, make_job, read_env_file

CONFIG = """
workload: petnames
cluster: {gpus: 2}
failure: {grace_s: 45}
retrain: {model: petnames, deadline: 6h}
notify: {urls: ["env:SLACK_URL", "json://10.0.0.5"], heartbeat: "env:CHECK_URL"}
models: {dir: "s3://pets/models"}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nightly.yaml"
    path.write_text(CONFIG)
    return path


def job_of(at: str = "03:00", jitter_s: float = 0.0, **environ: str) -> Job:
    return make_job(load_config("nightly.yaml"), parse_schedule(at), "", jitter_s, environ)


def test_paths_are_absolute_and_values_those_of_the_configuration(config: Path, tmp_path: Path) -> None:
    job = job_of()
    installed = Path(sysconfig.get_path("scripts"), "ddptrain")
    program = (str(installed),) if installed.exists() else (sys.executable, "-m", "ddptrain")
    assert job.command == (*program, "retrain", str(config), "--slot", "03:00 UTC", "--output", "plain")
    assert (job.name, job.model, job.workdir, job.models_dir) == ("petnames", "petnames", tmp_path, "s3://pets/models")
    assert job.stop_s == 105


@pytest.mark.parametrize("name", ["a\nExecStartPre=touch x", "a\rb", "a\x1bb"])
def test_folder_whose_name_would_begin_a_line_of_its_own_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    config.rename(folder / "nightly.yaml")
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="a line break or another control character, which a scheduler"):
        job_of()


def test_environment_has_no_secrets(config: Path) -> None:
    job = job_of(
        PATH="/a:/b:/a",
        VIRTUAL_ENV="/venv",
        https_proxy="http://ada:hunter22@proxy:3128",
        no_proxy="localhost",
        SLACK_URL="https://hooks.slack.com/services/T0/B0/secret",
        AWS_SECRET_ACCESS_KEY="secret",
        HOME="/home/me",
    )
    assert job.environment == {"PATH": "/a:/b", "VIRTUAL_ENV": "/venv", "no_proxy": "localhost"}
    assert job.secrets == ("AWS_SECRET_ACCESS_KEY", "CHECK_URL", "SLACK_URL", "https_proxy")


def test_configuration_without_retrain_is_refused(config: Path) -> None:
    config.write_text("workload: petnames\n")
    with pytest.raises(
        UsageError, match=r"nightly.yaml has no section retrain.* add for example retrain: {model: \w+}"
    ):
        job_of()


def test_jitter_of_a_whole_interval_is_refused(config: Path) -> None:
    assert job_of("every 15m", 899.0).jitter_s == 899
    with pytest.raises(UsageError, match="--jitter is 900 s, and the schedule repeats after 900 s"):
        job_of("every 15m", 900.0)


@pytest.mark.parametrize("name", ["../x", "a..b", "A", "a b", "a/b", "-a", "", "a\n", "a" * 65])
def test_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a name of a schedule"):
        checked_name(name)


def env_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "petnames.env"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_secret_variables_are_read_as_by_a_shell(tmp_path: Path) -> None:
    text = "# A comment\n\nA=1\nB='x y'\nexport C=\"z#\"\nD=\n  ; of systemd\n"
    assert read_env_file(env_file(tmp_path, text)) == {"A": "1", "B": "x y", "C": "z#", "D": ""}
    assert read_env_file(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB=x y\n", r"petnames.env:2 is not a line like NAME=value; put quotes"),
        ("A\n", r"petnames.env:1 is not a line like NAME=value"),
        ("A='x\n", r"petnames.env:1 is not a line like NAME=value: No closing quotation"),
    ],
)
def test_wrong_line_of_the_secret_variables_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_env_file(env_file(tmp_path, text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_secret_variables_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=r"other users may read or change it: chmod 600"):
        read_env_file(env_file(tmp_path, "A=1\n", mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_secret_variables_of_another_user_are_refused(tmp_path: Path) -> None:
    path = env_file(tmp_path, "A=1\n")
    os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match=r"other users may read or change it"):
        read_env_file(path)
