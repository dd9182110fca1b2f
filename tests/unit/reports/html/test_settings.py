"""Settings and how they differ from the defaults."""

from __future__ import annotations

from pathlib import Path

from ddptrain.reports.html.run_card import Setting, read_settings


def settings(path: Path, text: str) -> list[Setting]:
    path.write_text(text)
    return read_settings(path)


def test_differences_from_the_defaults_of_a_built_in_workload(tmp_path: Path) -> None:
    text = "workload: petnames\nname: x\nparams: {epochs: 3, window: 8}\ncluster: {backend: local, ranks: 2}\n"
    found = settings(tmp_path / "config.yaml", text)
    assert [(one.key, one.value, one.default) for one in found if one.is_changed] == [
        ("workload", "petnames", None),
        ("name", "x", None),
        ("params.epochs", "3", "25"),
        ("cluster.ranks", "2", "auto"),
    ]


def test_params_of_other_workloads_have_no_default(tmp_path: Path) -> None:
    found = settings(tmp_path / "config.yaml", "workload: mine:main\nparams: {epochs: 3}\n")
    assert found[1] == Setting("params.epochs", "3", None)


def test_secret_is_left_out_and_text_is_bounded(tmp_path: Path) -> None:
    found = settings(tmp_path / "config.yaml", f"params: {{api_key: abcdefgh, long: {'x' * 5000}}}\n")
    assert "abcdefgh" not in str(found)
    assert len(found[1].value) == 300


def test_file_that_is_no_configuration_has_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("", "- 1", "{", "a: &a [*a]", "a: !!python/object:os.system x"):
        assert settings(path, text) == []
    path.unlink()
    assert read_settings(path) == []
