"""The sections for `ddptrain retrain`: durations, defaults, and the message for each wrong field."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.config.load import load_config
from ddptrain.config.types import duration_s
from ddptrain.errors import ConfigError

BASE = "workload: petnames\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("90m", 5400), ("6h", 21600), ("30d", 2592000), ("2w", 1209600), ("1h30m", 5400), ("0.5h", 1800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "6 hours", "6h30", "-1h", "1e3s", "6h;"])
def test_text_that_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a duration: write a number with s, m, h, d or w, as in "6h"'):
        duration_s(text)


def test_one_condition_is_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{BASE}retrain: {{model: m, gate: {{metric: acc, mode: max}}, deadline: 90m}}\n")
    config = load_config(path).config
    assert config.retrain is not None
    assert [(each.metric, each.mode) for each in config.retrain.gate] == [("acc", "max")]
    assert config.retrain.deadline == 5400.0


def test_urls_of_the_file_are_recorded_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    url = "https://hooks.example.com/T0/B0/verysecrettoken"
    path.write_text(f'{BASE}notify: {{urls: ["{url}", "env:SLACK_URL"], heartbeat: "{url}/ping"}}\n')
    resolved = load_config(path)
    assert "verysecrettoken" not in resolved.yaml_text
    assert "env:SLACK_URL" in resolved.yaml_text
    assert url in resolved.secrets


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("retrain: {}", "retrain.model", "is required"),
        ("retrain: {model: ../up}", "retrain.model", "../up"),
        ("retrain: {model: UPPER}", "retrain.model", "UPPER"),
        ("retrain: {model: m, overlap: sometimes}", "retrain.overlap", "sometimes"),
        ("retrain: {model: m, wait: soon}", "retrain.wait", "not a duration"),
        ("retrain: {model: m, wait: -1}", "retrain.wait", "-1"),
        ("retrain: {model: m, if_unchanged: maybe}", "retrain.if_unchanged", "maybe"),
        ("retrain: {model: m, deadline: 6 hours}", "retrain.deadline", "not a duration"),
        ("retrain: {model: m, gate: {}}", "metric", "is required"),
        ("retrain: {model: m, gate: {metric: a, mode: best}}", "mode", "best"),
        ("retrain: {model: m, gate: {metric: a, at_most: low}}", "at_most", "low"),
        ("retrain: {model: m, gate: {metric: a, at_most: .nan}}", "at_most", "nan"),
        ("retrain: {model: m, gate: {metric: a, at_least: 2, at_most: 1}}", "at_least", "above at_most"),
        ("retrain: {model: m, gate: {metric: a, against: other}}", "against", "other"),
        ("retrain: {model: m, gate: [{metric: a}, {metric: b, mood: max}]}", "retrain.gate[1].mood", "unknown key"),
        ("retrain: {model: m, keep: 1}", "retrain.keep", "1"),
        ("retrain: {model: m, modle: x}", "retrain.modle", "unknown key"),
        ("data: {sources: data}", "data.sources", "data"),
        ("data: {sources: ['']}", "data.sources", ""),
        ("notify: {urls: [5]}", "notify.urls", "5"),
        ("notify: {on: [sometimes]}", "notify.on", "sometimes"),
        ("models: {dir: ''}", "models.dir", ""),
        ("models: {folder: x}", "models.folder", "unknown key"),
        ("evaluate: not a function", "evaluate", "not a function"),
    ],
)
def test_wrong_field_is_named_with_its_line(tmp_path: Path, section: str, key: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{BASE}{section}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert f"{path}:2" in text and key in text and message in text, text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "metric", "mode"),
    [
        ("", "val/loss", "min"),
        ("checkpoint: {metric: accuracy, mode: max}\n", "accuracy", "max"),
        ("checkpoint: {metric: loss}\n", "loss", "min"),
        ("checkpoint: {metric: null}\n", "val/loss", "min"),
    ],
)
def test_gate_is_the_metric_of_the_best_checkpoint_unless_given(
    tmp_path: Path, more: str, metric: str, mode: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"workload: petnames\nretrain: {{model: m}}\n{more}")
    retrain = load_config(path).config.retrain
    assert retrain is not None
    assert [(rule.metric, rule.mode) for rule in retrain.gate] == [(metric, mode)]
    path.write_text(f"workload: petnames\nretrain: {{model: m, gate: {{metric: other}}}}\n{more}")
    retrain = load_config(path).config.retrain
    assert retrain is not None and [rule.metric for rule in retrain.gate] == ["other"]
