"""Runs in a real S3 server: they are tagged, selected, compared, exported and pruned, also after a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import S3Store

from tests.contract.conftest import Project
from tests.servers.seaweed import bucket_of, seaweed
from tests.support.command import wait_until

RUNS = "s3://bucket/runs"
FILES = 300
HOLD = """
import time

def train(ctx):
    print("holding", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def bucket(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    (project.folder / "seaweed").mkdir()
    with seaweed(project.folder / "seaweed", "bucket") as environment:
        for name, value in {**environment, "XDG_CACHE_HOME": str(project.folder / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield bucket_of(environment, "bucket")


def put(bucket: S3Store, run_id: str, day: int, **record: object) -> None:
    started = {"started_at": f"2025-01-{day:02}T00:00:00.000Z", "status": "succeeded", "name": "pets"}
    bucket.put(f"runs/{run_id}/run.json", json.dumps({"run_id": run_id, **started, **record}).encode())


def files(bucket: S3Store, run_id: str = "") -> list[str]:
    return [item["path"] for page in bucket.list(f"runs/{run_id}") for item in page]


def test_runs_are_tagged_at_once_selected_compared_and_exported(project: Project, bucket: S3Store) -> None:
    for run_id, layers, loss in (("one", 1, 4.0), ("two", 2, 2.0)):
        lines = [json.dumps({"time_s": step, "step": step, "rank": 0, "val/loss": loss / step}) for step in (1, 2)]
        bucket.put(f"runs/{run_id}/metrics.jsonl", "".join(f"{line}\n" for line in lines).encode())
        bucket.put(f"runs/{run_id}/config.yaml", f"params: {{layers: {layers}}}\n".encode())
        bucket.put(f"runs/{run_id}/inputs/manifest.json", b'{"n": %d}' % layers)
        put(bucket, run_id, 1, params={"layers": layers}, last_metrics={"val/loss": loss / 2})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tag: project("results", "edit", f"{RUNS}/one", f"+{tag}", rc=0), "abcd"))
    notes = json.loads(bytes(bucket.get("runs/one/annotations.json").bytes()))
    assert sorted(notes["tags"]) == ["a", "b", "c", "d"]

    where = ["--where", "'a' in tags and best(val/loss) == 2", "--columns", "run,params.layers,tags"]
    listed = project("results", "list", "--runs-dir", RUNS, *where, rc=0)
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["one", "1"]]

    compared = json.loads(project("results", "compare", "one", "two", "--runs-dir", RUNS, "--json", rc=0).stdout)
    differences = compared["differences"]
    assert differences["params"] == {"layers": [1, 2]} and list(differences["data"]) == ["manifest.json"]
    metrics = [(each["name"], each["winner"], each["best"]) for each in compared["metrics"]]
    assert metrics == [("val/loss", "two", [2, 1])]

    project("results", "export", "one", "two", "--runs-dir", RUNS, "-o", "out", rc=0)
    assert len((project.folder / "out/metrics.csv").read_text().splitlines()) == 5


def test_run_is_deleted_though_the_first_prune_is_killed_and_a_running_one_is_kept(
    project: Project, shared_cluster: str, bucket: S3Store
) -> None:
    name = project.function(HOLD, results={"dir": RUNS})
    held = project.start("train", name, "--cluster", shared_cluster, "--ranks", "1", "--run-id", "live")
    held.wait_for("holding")
    arguments = ("results", "prune", "--keep", "1", "--runs-dir", RUNS)
    for _ in range(10):  # it may be faster than the kill
        put(bucket, "old", 1)
        put(bucket, "new", 3)
        for number in range(FILES):
            bucket.put(f"runs/old/logs/rank-{number}.log", b"x" * 1000)
        killed = project.start(*arguments)
        wait_until(lambda: "runs/old/run.json" not in files(bucket, "old/"))
        killed.kill_group()
        if left := files(bucket, "old/"):
            break
    assert left

    listed = project("results", "list", "--runs-dir", RUNS, rc=0)
    assert "new" in listed.stdout and "live" in listed.stdout and "old" not in listed.stdout
    second = project(*arguments, rc=0)
    assert "left by an interrupted prune" in second.stdout
    assert {path.split("/")[1] for path in files(bucket)} == {"live", "new"}
    held.popen.terminate()
    held.finish()


def test_index_of_many_runs_follows_their_changes(project: Project, bucket: S3Store) -> None:
    for number in range(103):
        put(bucket, f"run-{number:03}", 1 + number % 28)

    def listed(*words: str) -> list[str]:
        return [
            each["run_id"] for each in json.loads(project("results", "list", "--json", *where, *words, rc=0).stdout)
        ]

    where = ["--runs-dir", RUNS, "--limit", "200"]
    assert len(listed()) == 103 and any("index" in path for path in files(bucket))
    project("results", "edit", f"{RUNS}/run-005", "+kept", rc=0)
    assert listed("--where", "'kept' in tags") == ["run-005"]
    project("results", "rm", "run-006", "--runs-dir", RUNS, rc=0)
    assert len(listed()) == 102 and "run-006" not in listed()


def test_sweep_is_stopped_where_it_runs_and_neither_it_nor_a_trial_is_deleted_as_a_run(
    project: Project, bucket: S3Store
) -> None:
    sweep = {"format": 1, "sweep_id": "sw", "name": "sw", "source": "", "started_at": "2025-01-01T00:00:00Z"}
    put(bucket, "sw", 1, kind="sweep", status="running", driver={"pid": 7, "host": "elsewhere", "boot_id": "x"})
    bucket.put("runs/sw/sweep.json", json.dumps({**sweep, "status": "running"}).encode())
    trial = {"run_id": "sw-0000", "status": "succeeded", "started_at": "2025-01-01T00:00:00Z"}
    bucket.put("runs/sw/sw-0000/run.json", json.dumps(trial).encode())
    claim = {"host": "elsewhere", "pid": 7, "born": 0.0, "token": "t", "time_s": time.time(), "machine": "x"}
    bucket.put("runs/sw/run.lock", json.dumps(claim).encode())
    where = ("--runs-dir", RUNS)
    refused = project("stop", "sw", *where, rc=2)
    assert "can only be stopped on elsewhere, where its driver is process 7" in refused.stderr
    bucket.put("runs/sw/run.lock", json.dumps({**claim, "released": True}).encode())
    assert "only whole runs can be deleted" in project("results", "rm", "sw/0", *where, rc=2).stderr
    assert "is a sweep" in project("results", "rm", "sw", *where, rc=2).stderr
    assert len(files(bucket, "sw/")) == 4


@pytest.mark.long
def test_trained_run_is_used_on_a_machine_that_has_no_copy(
    project: Project, shared_cluster: str, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--set", f"results.dir={RUNS}", "--set", "params.epochs=1", "--run-id", "pets-1"]
    project("train", "petnames", "--cluster", shared_cluster, "--ranks", "2", *options, rc=0)
    for number, command in enumerate(
        (
            ("generate", f"{RUNS}/pets-1", "--count", "2"),
            ("evaluate", f"{RUNS}/pets-1", "--cluster", shared_cluster, "--ranks", "1"),
            ("models", "promote", "pets", f"{RUNS}/pets-1"),
        )
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(project.folder / f"cache-{number}"))
        project(*command, rc=0)
    project("generate", "pets@champion", "--count", "2", rc=0)
