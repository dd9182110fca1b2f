"""Tags, selection and comparison of runs in a real S3 server, and where the time of a real run went."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddptrain.results.run_record import RunRecord
from ddptrain.storage.remote_folder import RemoteFolder
from tests.conftest import Cli
from tests.servers.seaweed import seaweed


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "seaweed").mkdir()
    with seaweed(tmp_path / "seaweed", "bucket") as environment:
        home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
        for name, value in (environment | home).items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/runs"


def put(store: RemoteFolder, run_id: str, layers: int, loss: float) -> None:
    record = RunRecord(run_id=run_id, name="pets", status="succeeded", started_at="2025-01-01T00:00:00.000Z")
    run = store.below(run_id)
    lines = [json.dumps({"time_s": step, "step": step, "rank": 0, "val/loss": loss / step}) for step in (1, 2)]
    run.write("metrics.jsonl", "".join(f"{line}\n" for line in lines).encode())
    run.write("config.yaml", f"params: {{layers: {layers}}}\n".encode())
    run.write("inputs/manifest.json", b'{"n": %d}' % layers)
    record = dataclasses.replace(record, params={"layers": layers}, last_metrics={"val/loss": loss / 2})
    run.write("run.json", record.to_json().encode())


def test_runs_in_a_store_are_tagged_at_once_selected_compared_and_exported(url: str, run_cli: Cli) -> None:
    store = RemoteFolder.open(url)
    put(store, "one", 1, 4.0)
    put(store, "two", 2, 2.0)
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda tag: run_cli("results", "edit", f"{url}/one", f"+{tag}"), ("a", "b", "c", "d")))
    assert [each.rc for each in ended] == [0, 0, 0, 0], [each.stderr for each in ended]
    assert sorted(json.loads(store.read("one/annotations.json") or b"")["tags"]) == ["a", "b", "c", "d"]

    where = ["--where", "'a' in tags and best(val/loss) == 2", "--columns", "run,params.layers,tags"]
    listed = run_cli("results", "list", "--runs-dir", url, *where)
    assert listed.rc == 0 and [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["one", "1"]]

    compared = json.loads(run_cli("results", "compare", "one", "two", "--runs-dir", url, "--json").stdout)
    differences = compared["differences"]
    assert differences["params"] == {"layers": [1, 2]} and list(differences["data"]) == ["manifest.json"]
    assert [(each["name"], each["winner"], each["best"]) for each in compared["metrics"]] == [
        ("val/loss", "two", [2, 1])
    ]

    exported = run_cli("results", "export", "one", "two", "--runs-dir", url, "-o", "out")
    assert exported.rc == 0 and len((run_cli.folder / "out/metrics.csv").read_text().splitlines()) == 5


def test_the_last_lines_of_a_run_say_where_the_time_went(run_cli: Cli) -> None:
    (run_cli.folder / "work.py").write_text(
        "import time\n\n\ndef main(ctx, **params):\n"
        "    time.sleep(0.3)\n    with ctx.timed('evaluation'):\n        time.sleep(0.6)\n"
    )
    (run_cli.folder / "c.yaml").write_text("workload: work:main\ncluster: {backend: local, ranks: 1}\n")
    ended = run_cli("train", "c.yaml", "--run-id", "r")
    assert ended.rc == 0, ended.stderr
    (line,) = re.findall(r"^  time    (.*)$", ended.stdout + ended.stderr, re.MULTILINE)
    assert [part.split()[0] for part in line.split(", ")] == ["queue", "start", "training", "evaluation", "end"]
    shown = json.loads(run_cli("results", "show", "r", "--json").stdout)
    assert shown["time_use_s"]["evaluation"] >= 0.6
    assert sum(shown["time_use_s"].values()) == pytest.approx(shown["duration_s"], abs=0.01)
