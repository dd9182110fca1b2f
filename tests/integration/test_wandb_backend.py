"""The stub of the W&B backend, with wandb itself as its client: what it remembers is what was sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.wandb_backend import API_KEY, Backend, wandb_backend
from tests.servers.wandb_runs import plain

CLIENT = """
import json, sys
import wandb

given = json.loads(sys.argv[1])
settings = wandb.Settings(console="off", silent=True, init_timeout=80, finish_timeout=80, **given["settings"])
config = {"lr": 0.5} if given["rank"] == 0 else None
run = wandb.init(
    project="pets", id="the-id", name="the name", group="all", tags=["a"], config=config, resume="allow",
    settings=settings,
)
key = f"rank_{given['rank']}/loss"
for step in range(5):
    run.log({key: 1.0 / (step + 1)})
if given["rank"] == 0:
    artifact = wandb.Artifact("predictions", "table")
    with artifact.new_file("rows.csv") as file:
        file.write("name,score\\nrex,1\\n")
    run.log_artifact(artifact)
run.finish(exit_code=given["exit"])
"""


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as there:
        yield there


class Clients:
    """Processes that use wandb as its guide says."""

    def __init__(self, folder: Path, backend: Backend) -> None:
        self.folder, self.backend = folder, backend
        (folder / "command.py").write_text(CLIENT)

    def start(self, rank: int = 0, exit_code: int = 0, **settings: object) -> subprocess.Popen[bytes]:
        given = json.dumps({"rank": rank, "exit": exit_code, "settings": settings})
        kept = {name: str(self.folder) for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, str(self.folder / "command.py"), given],
                env={**os.environ, **self.backend.environment, **kept},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )


@pytest.fixture
def clients(tmp_path: Path, backend: Backend) -> Clients:
    return Clients(tmp_path, backend)


def test_run_has_its_rows_its_artifact_and_its_end_also_when_it_is_resumed(backend: Backend, clients: Clients) -> None:
    for exit_code in (1, 0):
        assert clients.start(exit_code=exit_code).wait(100) == 0, (clients.folder / "said.txt").read_text()
    run = backend.run
    assert (run.id, run.project, run.name, run.group, run.tags) == ("the-id", "pets", "the name", "all", ["a"])
    assert run.settings == {"lr": 0.5}
    assert [row["_step"] for row in run.history] == [*range(10)]
    assert [row["rank_0/loss"] for row in run.history] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5] * 2
    assert run.summary["rank_0/loss"] == 1 / 5
    assert (run.exits, run.state) == ([1, 0], "finished")
    assert "wandb-metadata.json" in run.files
    artifact = backend.artifact("predictions")
    assert (artifact.type, artifact.run, artifact.state) == ("table", "the-id", "COMMITTED")
    assert artifact.files == {"rows.csv": b"name,score\nrex,1\n"}
    assert [*artifact.manifest["contents"]] == ["rows.csv"]
    assert backend.keys == {API_KEY}
    assert not backend.unknown


def test_processes_in_shared_mode_are_clients_of_one_run(backend: Backend, clients: Clients) -> None:
    started = [
        clients.start(rank, mode="shared", x_label=f"rank_{rank}", x_primary=rank == 0, x_update_finish_state=rank == 0)
        for rank in range(2)
    ]
    assert [process.wait(100) for process in started] == [0, 0], (clients.folder / "said.txt").read_text()
    run = backend.run
    assert len(run.clients) == 2
    sent = {key for stream in run.clients.values() for row in stream.history for key in row if key.startswith("rank")}
    assert sent == {"rank_0/loss", "rank_1/loss"}
    assert [len(stream.history) for stream in run.clients.values()] == [5, 5]
    assert {"lr": 0.5} in [plain(stream.config) for stream in run.clients.values()]
    assert run.exits == [0], "the primary alone finishes it"


def ask(backend: Backend, query: str = "query Viewer { viewer { id } }", timeout_s: float = 60.0) -> object:
    request = urllib.request.Request(backend.url + "/graphql", json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def test_backend_breaks_as_it_is_told(backend: Backend) -> None:
    backend.fault = "unauthorized"
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        ask(backend)
    refused.value.close()
    backend.fault = "broken"
    with pytest.raises(urllib.error.HTTPError, match="500") as broken:
        ask(backend)
    broken.value.close()
    backend.fault = "hang"
    with pytest.raises(TimeoutError):
        ask(backend, timeout_s=0.5)
    backend.fault = ""
    assert ask(backend, "query Odd ($a: Int) { thing(of: {a: $a}) { id } other: more { x } }") == {
        "data": {"thing": None, "other": None}
    }
    assert backend.unknown == {"Odd"}
    backend.die()
    with pytest.raises(OSError, match="refused"):
        ask(backend)


def test_backend_dies_with_the_row_that_it_was_told(backend: Backend) -> None:
    backend.die_after(2)
    rows = {"files": {"wandb-history.jsonl": {"offset": 0, "content": ['{"_step": 0}', '{"_step": 1}']}}}
    request = urllib.request.Request(backend.url + "/files/e/p/r/file_stream", json.dumps(rows).encode())
    with pytest.raises(OSError, match=r"without response|reset"):
        urllib.request.urlopen(request, timeout=60)
    with pytest.raises(OSError, match="refused"):
        ask(backend)
    assert [row["_step"] for row in backend.run.history] == [0, 1]
