from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.results.export import mlflow as mlflow_module
from ddptrain.results.export.mlflow import export_mlflow
from ddptrain.results.metrics import read_series
from ddptrain.results.run_record import GitRecord
from tests.unit.results.export.test_tables import put


@pytest.fixture(autouse=True)
def mlflow_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's end restore the variables that an export sets for its process."""
    for name, value in (("ALLOW_FILE_STORE", "true"), ("DISABLE_TELEMETRY", "true"), ("HTTP_REQUEST_MAX_RETRIES", "2")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)


def test_mlflow_reads_the_runs_and_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    lines = [{"step": step, "rank": rank, "val/loss": step + rank / 2} for step in (1, 2) for rank in (0, 1)]
    view = put(
        tmp_path,
        "a",
        *lines,
        {"step": 1, "top@5": 0.5},
        params={"layers": 2, "deep": {"on": True}, **{f"p{number}": number for number in range(120)}},
        git=GitRecord("c" * 40),
        started_at="2025-01-01T00:00:00Z",
    )
    (view.layout.root / "annotations.json").write_text('{"tags": ["good"], "note": "why"}')
    first = export_mlflow([view], str(tmp_path / "mlruns"))
    (run_id,) = export_mlflow([view], str(tmp_path / "mlruns"))
    assert first != [run_id]

    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'n'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "a", "FINISHED")
    assert run.info.start_time == 1735689600000
    assert [(each.step, each.value) for each in client.get_metric_history(run_id, "val/loss")] == [(1, 1.25), (2, 2.25)]
    assert run.data.metrics["top_5"] == 0.5
    assert (run.data.params["layers"], run.data.params["deep.on"], len(run.data.params)) == ("2", "True", 122)
    tags = {"tag.good": "true", "mlflow.note.content": "why", "mlflow.source.git.commit": "c" * 40}
    assert tags.items() <= run.data.tags.items()


def test_a_failure_is_one_line_and_leaves_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    def fail(client: MlflowClient, run_id: str, **items: object) -> None:
        raise OSError("no space\nleft")

    view = put(tmp_path, "a", {"step": 1, "val/loss": 1.0})
    export_mlflow([view], str(tmp_path / "mlruns"))
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", fail)
        with pytest.raises(ClusterError, match=r"^cannot export to MLflow in .*mlruns: .*no space"):
            export_mlflow([view], str(tmp_path / "mlruns"))
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'n'")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'mlflow-skinny>=3'"):
        export_mlflow([], "x")


class Client:
    """A client that notes what it is told; `fails`: log_batch and delete_run do."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.told: list[tuple[Any, ...]] = []
        self.params: list[list[tuple[str, str]]] = []
        self.metrics: list[list[tuple[str, float, int, int]]] = []

    def get_experiment_by_name(self, name: str) -> None:
        self.told.append(("experiment", name))

    def create_experiment(self, name: str) -> int:
        return 7

    def search_runs(self, experiments: list[str], condition: str) -> list[Any]:
        self.told.append(("search", experiments, condition))
        return [SimpleNamespace(info=SimpleNamespace(run_id="earlier"))]

    def create_run(self, experiment: str, start_ms: int | None, tags: dict[str, str], name: str) -> Any:
        self.told.append(("create", experiment, start_ms, tags, name))
        return SimpleNamespace(info=SimpleNamespace(run_id="new"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "new"
        if self.fails:
            raise OSError("no space")
        if params:
            self.params.append([(each.key, each.value) for each in params])
        if metrics:
            self.metrics.append([(each.key, each.value, each.timestamp, each.step) for each in metrics])

    def set_terminated(self, run_id: str, status: str, end_ms: int | None) -> None:
        self.told.append(("ended", run_id, status, end_ms))

    def delete_run(self, run_id: str) -> None:
        self.told.append(("deleted", run_id))
        if self.fails:
            raise OSError("gone")


def export(view: Any, client: Any) -> str:
    return mlflow_module._export(client, view, read_series(view.layout.metrics_jsonl))


def test_run_is_told_with_its_times_tags_and_end(tmp_path: Path) -> None:
    fields = {"started_at": "2025-01-01T00:00:00Z", "ended_at": "2025-01-01T00:00:01.5Z", "workload": "w"}
    view = put(tmp_path, "a", {"step": 4, "x": 0.5}, params={"a b": "\ud800" + "v" * 7_000, "n" * 300: 1}, **fields)
    (view.layout.root / "annotations.json").write_text('{"tags": ["good", "gr\u00f6\u00dfe"], "note": ""}')
    client = Client()
    assert export(view, client) == "new"
    tags = {"ddptrain.run_id": "a", "ddptrain.run_dir": f"{tmp_path}/a", "ddptrain.workload": "w", "tag.good": "true"}
    assert client.told == [
        ("experiment", "n"),
        ("search", ["7"], "tags.`ddptrain.run_id` = 'a'"),
        ("create", "7", 1735689600000, tags, "a"),
        ("ended", "new", "FINISHED", 1735689601500),
        ("deleted", "earlier"),
    ]
    assert client.params == [[("a b", "\\ud800" + "v" * 5_994), ("n" * 250, "1")]]
    assert client.metrics == [[("x", 0.5, 1500, 4)]]


@pytest.mark.parametrize(
    ("status", "told"),
    [("failed", "FAILED"), ("preempted", "KILLED"), ("cancelled", "KILLED"), ("new", "KILLED"), ("running", None)],
)
def test_end_of_a_run_in_words_of_mlflow(tmp_path: Path, status: str, told: str | None) -> None:
    view = put(tmp_path, "a")
    client = Client()
    export(dataclasses.replace(view, record=dataclasses.replace(view.record, status=status, name="")), client)
    assert client.told[0] == ("experiment", "ddptrain")
    assert [each for each in client.told if each[0] == "ended"] == ([("ended", "new", told, None)] if told else [])
    assert client.told[2][2] is None, "the time of its start is not known"


def test_requests_have_at_most_100_parameters_and_1000_metrics(tmp_path: Path) -> None:
    params = {f"p{number}": number for number in range(101)}
    view = put(tmp_path, "a", *({"step": step, "x": 1.0} for step in range(1001)), params=params)
    client = Client()
    export(view, client)
    assert [len(each) for each in client.params] == [100, 1] and client.params[1] == [("p100", "100")]
    assert [len(each) for each in client.metrics] == [1000, 1] and client.metrics[1] == [("x", 1.0, 1500, 1000)]


def test_half_a_run_is_deleted_and_the_first_error_is_told(tmp_path: Path) -> None:
    client = Client(fails=True)
    with pytest.raises(OSError, match="no space"):
        export(put(tmp_path, "a", {"step": 1, "x": 1.0}), client)
    assert client.told[-1] == ("deleted", "new"), "and the earlier run is still there"
