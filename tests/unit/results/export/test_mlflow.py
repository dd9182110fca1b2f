from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.results.export.mlflow import export_mlflow
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
