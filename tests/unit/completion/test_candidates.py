"""What TAB offers, for each kind of word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.clusters.cluster_records import clusters_dir
from ddptrain.completion import names
from ddptrain.completion.candidates import TABLE, candidates, changes, read_table
from ddptrain.completion.config_fields import Field, fields_of
from ddptrain.config.json_schema import config_schema
from tests.docs.command_table import written


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs, clusters, a model and a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("DDPTRAIN_MODELS_DIR", raising=False)
    for run in ("runs/pets-1", "runs/pets-2", "other/dogs-1", "runs/$(reboot)", "runs/a b"):
        Path(run).mkdir(parents=True)
        Path(run, "run.json").write_text("{}")
    Path("runs/no-run").mkdir()
    for name in ("gpus", "night"):
        (clusters_dir() / name).mkdir()
        (clusters_dir() / name / "cluster.json").write_text("{}")
    Path("models/pets/versions/7").mkdir(parents=True)
    Path("models/pets/history").mkdir()
    Path("models/pets/history/000001.json").write_text("{}")
    Path("models/pets/history/000002.json").write_text(json.dumps({"aliases": {"champion": 7}}))
    Path("fit.yaml").write_text("workload: fit:train\nparams: {lr: 0.1, layers: 3, '$(reboot)': 1}\n")
    return tmp_path


def offered(line: str) -> set[str]:
    *words, word = line.split(" ")
    return set(candidates(read_table(), words, word))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tra", {"train"}),
        ("cluster s", {"status", "scale"}),
        ("results show pets-", {"pets-1", "pets-2"}),
        ("results show l", {"latest"}),
        ("results --runs-dir other show d", {"dogs-1"}),
        ("results show --runs-dir other d", {"dogs-1"}),
        ("results compare pets-1 p", {"pets-1", "pets-2"}),
        ("train x --resume a", {"auto"}),
        ("train x --resume=p", {"--resume=pets-1", "--resume=pets-2"}),
        ("train x --cluster ", {"gpus", "night"}),
        ("cluster down n", {"night"}),
        ("train f", {"fit.yaml"}),
        ("train petnames-w", {"petnames-wandb"}),
        ("train ./", set()),  # the shell completes files
        ("train x --output ", {"auto", "live", "plain", "json"}),
        ("train x --output=p", {"--output=plain"}),
        ("train x --all", {"--allow-changes", "--all-ranks"}),
        ("train x -- --all", set()),
        ("run train.py --al", set()),  # an option of the script
        ("run --al", {"--allow-changes", "--all-ranks"}),
        ("explain 13", {"130"}),
        ("generate pets@", {"pets@champion", "pets@7"}),
        ("generate pets", {"pets-1", "pets-2", "pets"}),
        ("models history ", {"pets"}),
        ("init --workload s", {"script"}),
        ("train fit.yaml --set params.l", {"params.lr=", "params.layers="}),
        ("train petnames --set params.lr_schedule=o", {"params.lr_schedule=one_cycle"}),
        ("train --set checkpoint.kee", {"checkpoint.keep="}),
        ("train x --set failure.max_restarts=", {"failure.max_restarts=0"}),
        ("no-such-command ", set(read_table()["commands"])),
    ],
)
def test_words_that_are_offered(line: str, expected: set[str]) -> None:
    assert offered(line) == expected


def test_fields_are_offered_one_level_at_a_time() -> None:
    fields = {"a.b.c": Field(), "a.b.d": Field(("x", "y")), "e": Field(("true", "false"))}
    assert set(changes(fields, "")) == {"a.", "e="}
    assert set(changes(fields, "a")) == {"a.b.c=", "a.b.d="}
    assert set(changes(fields, "a.b.d")) == {"a.b.d=x", "a.b.d=y"}
    assert set(changes(fields, "e=t")) == {"e=true", "e=false"}  # the caller filters
    assert changes(fields, "f") == {}


def test_table_of_commands_is_that_of_the_parser() -> None:
    assert Path(TABLE).read_text(encoding="utf-8") == written(), "run make schema"


def test_every_field_of_the_schema_is_known() -> None:
    fields = fields_of("petnames")
    definitions = config_schema()["$defs"]
    assert {f"params.{name}" for name in definitions["petnames.params"]["properties"]} <= set(fields)
    assert {f"checkpoint.{name}" for name in definitions["CheckpointConfig"]["properties"]} <= set(fields)
    assert fields["checkpoint.mode"].values == ("min", "max")
    assert not [name for name in fields_of("fit.yaml") if "$" in name]


@pytest.mark.parametrize("content", ["a: [", "[1]", "\x00", "params: 3", "- " * 5000])
def test_file_that_is_no_configuration_offers_no_params(content: str) -> None:
    Path("bad.yaml").write_text(content)
    assert not [name for name in fields_of("bad.yaml") if name.startswith("params.")]


def test_names_with_characters_of_a_shell_are_left_out() -> None:
    assert sorted(names.run_ids("runs")) == ["pets-1", "pets-2"]
    assert names.run_ids("s3://bucket/runs") == names.run_ids("missing") == []
