"""Commands that use a model: evaluate, predict and generate."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ddptrain.cli.main import main
from ddptrain.cli.models import evaluate as command
from ddptrain.cli.models.generate import generate
from ddptrain.config.load import load_mapping
from ddptrain.errors import ConfigError, UsageError
from ddptrain.results import recorded_config
from ddptrain.workloads.images import predict as workload
from ddptrain.workloads.images.data.predict_inputs import InputProblem, PredictInput
from ddptrain.workloads.images.model import saved_classifier as models
from ddptrain.workloads.images.predict import ImageResult, Prediction
from ddptrain.workloads.petnames import generate as sampler
from ddptrain.workloads.petnames.generate import Generated

# --- The table of `ddptrain evaluate`, and the configuration that it takes from a run ---


def test_configuration_of_a_run_is_read_without_the_values_that_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = load_mapping(
        {"workload": "petnames", "params": {"hidden_size": 8}, "env": {"API_KEY": "s3cret-value", "MODE": "fast"}},
        tmp_path,
    )
    (tmp_path / "config.yaml").write_text(written.yaml_text)
    found = command._configuration(tmp_path, ["params.layers=2"], {"cluster.ranks=3": "--ranks 3"}).config
    assert found.params["hidden_size"] == 8 and found.params["layers"] == 2
    assert found.cluster.ranks == 3 and found.env == {"MODE": "fast"}
    assert "does not contain the secrets env.API_KEY" in capsys.readouterr().err


EVIL = """
workload: petnames
params: {hidden_size: 8}
env: {LD_PRELOAD: /tmp/evil.so}
code: {folder: /home}
cluster: {backend: ssh, ranks: 2, ssh: {hosts: [a]}}
"""


def test_hosts_and_variables_of_another_users_run_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(EVIL)
    own = command._configuration(tmp_path, [], {}).config
    assert (own.cluster.backend, capsys.readouterr().err) == ("ssh", "")
    monkeypatch.setattr(recorded_config, "is_own_folder", lambda folder: False)
    found = command._configuration(tmp_path, ["env.MODE=fast"], {}).config
    assert (found.cluster.backend, found.cluster.ranks, found.cluster.ssh) == ("local", 2, None)
    assert (found.env, found.code.folder, found.params["hidden_size"]) == ({"MODE": "fast"}, None, 8)
    assert "its cluster, env, evaluate and options of stores are not used" in capsys.readouterr().err


def test_function_of_another_users_run_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def train(ctx): ...\ndef score(ctx, checkpoint): ...\n")
    (tmp_path / "runs" / "evil").mkdir(parents=True)
    (tmp_path / "runs" / "evil" / "code.py").write_text("def score(ctx, checkpoint): ...\n")
    (tmp_path / "config.yaml").write_text("workload: own:train\nevaluate: runs.evil.code:score\n")
    assert command._configuration(tmp_path, [], {}).config.evaluate == "runs.evil.code:score"
    monkeypatch.setattr(recorded_config, "is_own_folder", lambda folder: False)
    assert command._configuration(tmp_path, [], {}).config.evaluate is None
    assert command._configuration(tmp_path, ["evaluate=own:score"], {}).config.evaluate == "own:score"


def test_copy_of_a_run_in_a_store_is_not_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = tmp_path / "ddptrain" / "runs" / "store" / "run-1"
    copy.mkdir(parents=True)
    (copy / "config.yaml").write_text(EVIL)
    assert command._configuration(copy, [], {}).config.cluster.backend == "local"


def test_options_of_stores_of_another_users_run_are_not_used() -> None:
    source = {"source": "dask://x", "source_options": {"client": "tcp://evil:8786", "target_protocol": "file"}}
    assert recorded_config.of_the_model({"params": source, "cluster": "x"}) == {"params": {"source": "dask://x"}}


def test_run_without_a_usable_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't read the configuration"):
        command._configuration(tmp_path, [], {})
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(UsageError, match="is not a configuration of a run"):
        command._configuration(tmp_path, [], {})
    (tmp_path / "config.yaml").write_text("workload: petnames\n")
    with pytest.raises(ConfigError, match="--ranks 0"):
        command._configuration(tmp_path, [], {"cluster.ranks=0": "--ranks 0"})


# --- generate ---


app = typer.Typer()
app.command()(generate)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Stands in for the sampling: records its arguments, and gives two names of those asked for."""
    seen: dict[str, object] = {}

    def fake(
        run_dir: Path, count: int, prefix: str, temperature: float, seed: int | None, keep_known: bool
    ) -> Generated:
        seen.update(count=count, prefix=prefix, temperature=temperature, seed=seed, keep_known=keep_known)
        return Generated(("Luna", "Mr. Fox"), "step-9", 5, 1050, 3, 4, 0, limit_reached=count > 2)

    run_dir = tmp_path / "petnames-20260101-000000-abcd"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    monkeypatch.setattr(sampler, "generate_names", fake)
    monkeypatch.setattr("ddptrain.results.runs.find_run", lambda runs_dir, run: run_dir)
    return seen


def test_names_go_to_stdout_one_a_line(made: dict[str, object]) -> None:
    result = CliRunner().invoke(app, ["latest", "--count", "2", "--seed", "5"])
    assert result.exit_code == 0
    assert result.stdout == "Luna\nMr. Fox\n"
    assert result.stderr == "generate: 3 names of the training list were replaced\n"


def test_options_reach_the_sampling(made: dict[str, object]) -> None:
    CliRunner().invoke(app, ["latest", "--count", "7", "--prefix", "lu", "--temperature", "0.5", "--keep-known"])
    assert made == {"count": 7, "prefix": "lu", "temperature": 0.5, "seed": None, "keep_known": True}


def test_giving_up_and_a_random_seed_are_said_on_stderr(made: dict[str, object]) -> None:
    result = CliRunner().invoke(app, ["latest", "--count", "50"])
    assert result.stdout == "Luna\nMr. Fox\n"
    assert "the seed was 5" in result.stderr
    assert "only 2 of 50 names: gave up after 1,050 attempts" in result.stderr


def test_json_is_one_object(made: dict[str, object]) -> None:
    printed = json.loads(CliRunner().invoke(app, ["latest", "--json"]).stdout)
    assert printed["names"] == ["Luna", "Mr. Fox"]
    assert (printed["run_id"], printed["seed"], printed["limit_reached"]) == ("petnames-20260101-000000-abcd", 5, True)


# --- predict ---


CLASSES = ("blue", "green", "a very long name of a class that nobody wants to read to its end")


class Saved:
    """Stands in for the model of a run."""

    checkpoint = "step-9"
    names = CLASSES


class Classifier:
    """Stands in for the model at work: it sees blue, and files that are there can be read; records its arguments."""

    seen: dict[str, Any]

    def __init__(self, saved: object, top: int, device: object) -> None:
        self.seen |= {"top": top, "device": str(device)}

    def results(self, given: Iterable[PredictInput | InputProblem], batch_size: int) -> Iterator[ImageResult]:
        self.seen["batch_size"] = batch_size
        for one in given:
            if isinstance(one, InputProblem):
                yield ImageResult(one.name, error=one.reason)
            else:
                shares = [Prediction("blue", 0.75), Prediction("green", 0.2), Prediction(CLASSES[2], 0.05)]
                yield ImageResult(one.name, tuple(shares[: self.seen["top"]]))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run that sees blue, and two images in the working directory; what the classifier is told."""
    run = tmp_path / "runs" / "colours-20260101-000000-abcd"
    run.mkdir(parents=True)
    record = {"run_id": run.name, "status": "succeeded", "workload": "images", "checkpoints": ["step-1"]}
    (run / "run.json").write_text(json.dumps(record))
    (tmp_path / "pictures").mkdir()
    for name in ("one.png", "two\x1b[2J.png"):
        (tmp_path / "pictures" / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_model", lambda folder: Saved())
    monkeypatch.setattr(workload, "Classifier", Classifier)
    monkeypatch.setattr(Classifier, "seen", {}, raising=False)
    return Classifier.seen


def test_the_best_class_and_the_file_are_in_a_line_and_the_others_below(
    seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "latest", "pictures", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        " 75.0 %  blue                                        pictures/one.png\n"
        "   20.0 %  green\n"
        " 75.0 %  blue                                        pictures/two\N{REPLACEMENT CHARACTER}[2J.png\n"
        "   20.0 %  green\n"
    )
    assert err == ""


def test_what_can_not_be_read_is_told_and_the_exit_code_is_1(
    seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "latest", "nowhere", "pictures/one.png", "--top", "1"]) == 1
    out, err = capsys.readouterr()
    assert out.split() == ["75.0", "%", "blue", "pictures/one.png"]
    assert err == "predict: nowhere: no such file or folder\npredict: 1 of 2 could not be classified\n"


def test_json_is_one_value_with_a_line_an_image(seen: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "latest", "pictures/one.png", "nowhere", "--json", "--top", "2"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "run_id": "colours-20260101-000000-abcd",
        "checkpoint": "step-9",
        "results": [
            {
                "file": "pictures/one.png",
                "predictions": [{"class": "blue", "probability": 0.75}, {"class": "green", "probability": 0.2}],
            },
            {"file": "nowhere", "error": "no such file or folder"},
        ],
    }
    assert len(out.splitlines()) == 3
    assert err == "predict: 1 of 2 could not be classified\n"


def test_csv_has_a_column_for_each_class_and_one_for_the_error(
    seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "latest", "pictures/one.png", "nowhere", "--csv", "--top", "2"]) == 1
    assert list(csv.reader(capsys.readouterr().out.splitlines())) == [
        ["file", "class", "probability", "class_2", "probability_2", "error"],
        ["pictures/one.png", "blue", "0.75", "green", "0.2", ""],
        ["nowhere", "", "", "", "", "no such file or folder"],
    ]


def test_a_line_break_in_a_files_name_breaks_no_line_of_csv_or_text(
    seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pictures/a\nb.png").touch()
    assert main(["predict", "latest", "pictures/a\nb.png", "--csv", "--top", "1"]) == 0
    rows = csv.reader(io.StringIO(capsys.readouterr().out, newline=""))
    assert [*rows][1] == ["pictures/a\nb.png", "blue", "0.75", ""]
    assert main(["predict", "latest", "pictures/a\nb.png", "--top", "1"]) == 0
    assert capsys.readouterr().out.endswith("  pictures/a\N{REPLACEMENT CHARACTER}b.png\n")


def test_options_reach_the_model(seen: dict[str, Any]) -> None:
    assert main(["predict", "latest", "pictures", "--top", "3", "--batch-size", "7", "--device", "cpu"]) == 0
    assert seen == {"top": 3, "batch_size": 7, "device": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "latest"], "PATH is missing: write ddptrain predict [OPTIONS] RUN|MODEL PATH..."),
        (["predict", "latest", "nowhere"], "error: nowhere: no such file or folder"),
        (["predict", "none", "pictures"], 'error: no run "none" in runs'),
        (["predict", "latest", "pictures", "--json", "--csv"], "give --json or --csv, not both"),
        (["predict", "latest", "pictures", "--top", "0"], "--top: must be "),
        (["predict", "latest", "pictures", "--batch-size", "0"], "--batch-size: must be "),
        (["predict", "latest", "pictures", "--device", "tpu"], "--device: 'tpu' is not one of"),
    ],
)
def test_impossible_arguments_end_with_2(
    seen: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_torch_is_not_needed_to_find_that_a_path_is_wrong(
    seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ddptrain.workloads.images.predict", None)
    assert main(["predict", "latest", "nowhere"]) == 2


@pytest.mark.usefixtures("seen")
def test_latest_is_the_newest_run_that_can_classify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = tmp_path / "runs" / "images-failed"
    failed.mkdir()
    record = {"run_id": failed.name, "status": "failed", "workload": "images", "started_at": "2099-01-01T00:00:00Z"}
    (failed / "run.json").write_text(json.dumps(record))
    assert main(["predict", "latest", "pictures/one.png", "--json", "--top", "1"]) == 0
    told = capsys.readouterr()
    chosen = json.loads(told.out)["run_id"]
    assert chosen != failed.name
    assert f"using run {chosen}: the newest of images with a checkpoint\n" in told.err
