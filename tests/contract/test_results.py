"""What `ddptrain results` and `train` say about runs on disk, also about those of other hosts and other drivers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import INSTALLED, Project
from tests.servers.s3server import S3Server, s3_server

# Imported by every Python program that has it on PYTHONPATH: the clock of this host is two minutes ahead of the others.
CLOCK_AHEAD = """
import time
real = time.time
time.time = lambda: real() + 120.0
"""


def run_of_another_host(project: Project, age_s: float) -> None:
    """Write the directory of a run whose driver is on another host, and touched the lock so many seconds ago."""
    record = {"run_id": "far", "status": "running", "driver": {"pid": 1, "host": "another-host", "boot_id": "x"}}
    project.write("runs/far/run.json", json.dumps(record))
    lock = project.write("runs/far/run.lock", "process 1 on another-host\n")
    then = time.time() - age_s
    os.utime(lock, (then, then))


@pytest.mark.parametrize(("age_s", "status"), [(0.0, "running"), (60.0, "failed")])
def test_driver_of_another_host_is_judged_without_its_clock(project: Project, age_s: float, status: str) -> None:
    project.write("ahead/sitecustomize.py", CLOCK_AHEAD)
    run_of_another_host(project, age_s)
    shown = project("results", "show", "far", "--json", rc=0, env={"PYTHONPATH": str(project.folder / "ahead")})
    assert json.loads(shown.stdout)["status"] == status
    assert not list((project.folder / "runs/far").glob(".*"))


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with the bucket `bucket`, which writes each request into its log."""
    monkeypatch.setenv("RCLONE_LOG_LEVEL", "DEBUG")
    with s3_server(tmp_path) as server:
        (server.buckets / "bucket").mkdir()
        yield server


def test_list_of_a_store_reads_only_records_that_have_changed(project: Project, s3: S3Server) -> None:
    log = project.folder / "rclone-signed.log"
    env = {**s3.environment, "XDG_CACHE_HOME": str(project.folder / "cache")}

    def put(number: int, status: str) -> None:
        record = {"run_id": f"r-{number}", "status": status, "started_at": f"2026-01-01T00:00:{number:02d}Z"}
        project.write(f"buckets/bucket/runs/r-{number}/run.json", json.dumps(record))

    def listed() -> tuple[dict[str, str], int]:
        before = log.stat().st_size
        done = project("results", "list", "--json", "--runs-dir", "s3://bucket/runs", rc=0, env=env)
        requests = re.findall(rb"serve s3: (?:GET OBJECT|LIST BUCKET|HEAD OBJECT)", log.read_bytes()[before:])
        return {run["run_id"]: run["status"] for run in json.loads(done.stdout)}, len(requests)

    for number in range(20):
        put(number, "succeeded")
    statuses, _ = listed()
    assert statuses == {f"r-{number}": "succeeded" for number in range(20)}
    again, n_requests = listed()
    assert again == statuses and n_requests < 10
    put(7, "failed")
    assert listed()[0] == statuses | {"r-7": "failed"}


def test_checkpoints_of_a_run_in_a_store_are_its_folders(project: Project, shared_cluster: str, s3: S3Server) -> None:
    code = """
    import torch
    def train(ctx):
        for step in (1, 2):
            ctx.checkpoint(model=torch.nn.Linear(2, 1), step=step)
    """
    config = project.function(textwrap.dedent(code))
    project("train", config, "--cluster", shared_cluster, "--ranks", "1", rc=0)
    (run_dir,) = project.run_directories()
    shutil.copytree(run_dir, s3.buckets / "bucket" / "runs" / run_dir.name)
    program = "import ddptrain; print(*ddptrain.Run.find('latest', 's3://bucket/runs').checkpoints, sep='\\n')"
    env = {**os.environ, **s3.environment, "XDG_CACHE_HOME": str(project.folder / "cache")}
    python = Path(INSTALLED[0]).with_name("python")
    done = subprocess.run(
        [python, "-c", program], env=env, cwd=project.folder, capture_output=True, text=True, check=True
    )
    folders = [Path(line) for line in done.stdout.splitlines()]
    assert [folder.name for folder in folders] == ["step-2", "step-1"]
    assert all((folder / "model.safetensors").is_file() for folder in folders)


# As CLOCK_AHEAD: the file system does not answer the first read of the newest checkpoint.
DISK_FAILS_ONCE = """
import errno, hashlib, os
real, failed = hashlib.file_digest, []
def file_digest(file, *args, **options):
    if "step-2/" in os.readlink(f"/proc/self/fd/{file.fileno()}") and not failed:
        failed.append(True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(file, *args, **options)
hashlib.file_digest = file_digest
"""


@pytest.mark.long
def test_checkpoint_that_cannot_be_read_once_is_read_again(project: Project, shared_cluster: str) -> None:
    code = """
    import torch
    def train(ctx):
        model = torch.nn.Linear(2, 1)
        resumed = ctx.resume(model=model)
        for step in (1, 2) if resumed is None else ():
            ctx.checkpoint(model=model, step=step)
        assert resumed is not None, "the first attempt ends here"
        print("resumed step", resumed.step, flush=True)
    """
    project.write("broken/sitecustomize.py", DISK_FAILS_ONCE)
    config = project.function(textwrap.dedent(code))
    project("train", config, "--cluster", shared_cluster, "--ranks", "1", rc=1)
    env = {"PYTHONPATH": str(project.folder / "broken")}
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "1", "--resume", "latest", rc=0, env=env)
    assert "resumed step 2" in done.stdout + done.stderr
    assert "Input/output error" in done.stderr


def put_run(project: Project, run_id: str, **fields: object) -> Path:
    """Write the directory of a run that has ended."""
    record = {"run_id": run_id, "name": "work", "status": "succeeded", "started_at": "2026-01-01T00:00:00Z", **fields}
    return project.write(f"runs/{run_id}/run.json", json.dumps(record)).parent


def listed(project: Project, *options: str) -> list[str]:
    done = project("results", "list", "--json", *options, rc=0)
    return [run["run_id"] for run in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("status == failed", ["b"]),
        ("status != failed", ["a"]),
        ("status in [failed, preempted]", ["b"]),
        ("name == work and not status == 'failed'", ["a"]),
    ],
)
def test_text_in_a_condition_needs_no_quotes(project: Project, condition: str, expected: list[str]) -> None:
    put_run(project, "a")
    put_run(project, "b", status="failed")
    assert listed(project, "--where", condition) == expected
    assert not project("results", "list", "--where", condition, rc=0).stderr


def test_table_has_the_first_20_runs_and_json_all(project: Project) -> None:
    for number in range(23):
        put_run(project, f"r-{number:02d}", started_at=f"2026-01-01T00:00:{number:02d}Z")
    table = project("results", rc=0)
    assert "r-22" in table.stdout and "r-03" in table.stdout and "r-02" not in table.stdout
    assert "3 more runs; --limit 23 shows all of them" in table.stderr
    assert len(project("results", "list", "--limit", "22", rc=0).stdout.splitlines()) == 23  # with the header
    assert len(listed(project)) == 23


def test_runs_are_deleted_by_name(project: Project) -> None:
    folders = [put_run(project, name) for name in ("one", "two", "three")]
    assert project("results", "rm", "one", "thre-e", rc=2).stdout == ""
    assert all(folder.is_dir() for folder in folders), "a name is wrong, so nothing is deleted"
    done = project("results", "rm", "one", "tw", "--json", rc=0)
    assert [each["run_id"] for each in json.loads(done.stdout)["removed"]] == ["one", "two"]
    assert sorted(path.name for path in (project.folder / "runs").iterdir()) == ["three"]


def test_running_run_is_not_deleted(project: Project) -> None:
    run_of_another_host(project, 0.0)
    refused = project("results", "rm", "far", rc=6)
    assert "far is running" in refused.stderr
    assert (project.folder / "runs/far/run.json").is_file()


def test_run_of_version_0_1_0_is_listed_shown_exported_and_resumed(project: Project, shared_cluster: str) -> None:
    """It had two attempts: one failed at step 3, the other at step 5, after the last checkpoint that is kept."""
    old, run = Path(__file__).with_name("run_of_0_1_0"), "old-20250601-120000-0a1b"
    shutil.copytree(old, project.folder / "runs" / run)
    for name in ("work.py", "work.yaml"):
        (project.folder / "runs" / run / name).rename(project.folder / name)
    (listed_run,) = json.loads(project("results", "list", "--json", rc=0).stdout)
    assert (listed_run["run_id"], listed_run["status"]) == (run, "failed")
    shown = project.record(run)
    assert [each["failure"]["message"] for each in shown["attempts"]] == ["step 3 fails", "step 5 fails"]
    assert shown["checkpoints"] == ["step-5"] and shown["best"]["value"] == pytest.approx(0.7)
    assert sum(shown["time_use_s"].values()) == pytest.approx(shown["duration_s"], abs=0.01)
    assert "step 5" in project("results", "logs", run, rc=0).stdout
    project("results", "export", run, "-o", "out", rc=0)
    rows = (project.folder / "out/metrics.csv").read_text().splitlines()
    assert [row.split(",")[5] for row in rows[1:]] == ["1.0", "2.0", "3.0", "4.0", "5.0"]
    assert "unknown key" not in project("evaluate", run, rc=2).stderr  # its function can't be evaluated
    done = project("train", "work.yaml", "--resume", run, "--cluster", shared_cluster, rc=0)
    assert "step 6" in done.stdout + done.stderr and "step 5\n" not in done.stdout
    resumed = project.record(run)
    assert (resumed["status"], [each["resumed_from"] for each in resumed["attempts"]]) == ("succeeded", [None, 3, 5])


def unpack_runs_of_0_1_0(project: Project) -> None:
    shutil.unpack_archive(Path(__file__).with_name("runs_of_0_1_0.tar.xz"), project.folder, filter="data")


def test_run_that_0_1_0_has_resumed_is_listed_shown_exported_and_resumed_again(
    project: Project, shared_cluster: str
) -> None:
    """Its first part failed at step 3, the second at step 5."""
    unpack_runs_of_0_1_0(project)
    run = "old-20250601-120000-0a1b"
    assert [each["run_id"] for each in json.loads(project("results", "list", "--json", rc=0).stdout)] == [run]
    shown = project.record(run)
    assert [each["resumed_from"] for each in shown["attempts"]] == [None, 3] and shown["earlier_s"] > 0
    assert shown["time_use_s"]["training"] > 0
    assert "where the time went" in project("results", "show", run, rc=0).stdout
    project("results", "export", run, "-o", "out", rc=0)
    assert len((project.folder / "out/metrics.csv").read_text().splitlines()) == 6
    same = ("--set", "params.fail_at=[5]")
    done = project("train", "work.yaml", *same, "--resume", run, "--cluster", shared_cluster, rc=0)
    assert "step 6" in done.stdout + done.stderr
    resumed = project.record(run)
    assert (resumed["status"], [each["resumed_from"] for each in resumed["attempts"]]) == ("succeeded", [None, 3, 5])
    assert sum(resumed["time_use_s"].values()) == pytest.approx(resumed["duration_s"], abs=0.01)


def test_sweep_of_0_1_0_is_listed_shown_exported_and_resumed(project: Project, shared_cluster: str) -> None:
    """It has no run.json. Two of its trials are complete; SIGTERM has ended the third after its first step."""
    unpack_runs_of_0_1_0(project)
    sweep = "swept-20250601-130000-0a1b"
    (listed_sweep,) = json.loads(project("results", "list", "--sweeps", "--json", rc=0).stdout)
    assert (listed_sweep["sweep_id"], listed_sweep["status"], listed_sweep["best"]["number"]) == (sweep, "preempted", 1)
    assert sweep in project("results", "list", rc=0).stdout
    assert "2 complete, 1 interrupted" in project("results", "show", sweep, rc=0).stdout
    project("results", "export", f"{sweep}/0", f"{sweep}/1", "-o", "out", rc=0)
    assert len((project.folder / "out/metrics.csv").read_text().splitlines()) == 5
    done = project("sweep", "sweep.yaml", "--resume", "--cluster", shared_cluster, rc=0)
    assert "2 trials ended, 1 to continue" in done.stderr
    (listed_sweep,) = json.loads(project("results", "list", "--sweeps", "--json", rc=0).stdout)
    assert (listed_sweep["status"], listed_sweep["ended"]) == ("succeeded", 3)
    assert project.record(f"{sweep}/2")["attempts"][-1]["resumed_from"] == 1
