"""The table of `ddptrain evaluate`, and the configuration that it takes from a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.cli.models import evaluate as command
from ddptrain.config.load import load_mapping
from ddptrain.errors import ConfigError, UsageError
from ddptrain.results import recorded_config


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
