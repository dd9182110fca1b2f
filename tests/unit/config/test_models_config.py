"""The section models: the mirrors that are accepted, and the messages about others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import ConfigError


def load(**models: Any) -> ResolvedConfig:
    return load_mapping({"workload": "petnames", "models": models}, Path())


def test_name_alone_is_a_mirror_without_options() -> None:
    found = load(
        mirrors=["wandb", {"name": "mlflow", "options": {"tracking_uri": "http://host"}}]
    ).config.models.mirrors
    assert found is not None
    assert [(each.name, each.options) for each in found] == [("wandb", {}), ("mlflow", {"tracking_uri": "http://host"})]
    assert load().config.models.mirrors is None


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ({"mirrors": ["mlflo"]}, "there is no such mirror"),
        ({"mirrors": ["mlflo"]}, "did you mean mlflow?"),
        ({"mirrors": ["mine:"]}, "Your own is package.module:function"),
        ({"mirrors": [""]}, "models.mirrors[0]"),
        ({"mirrors": [{"options": {}}]}, "models.mirrors[0].name"),
        ({"mirrors": [{"name": "wandb", "option": {}}]}, "models.mirrors[0].option"),
        ({"mirrors": {"name": "wandb"}}, "models.mirrors: expected a list"),
        ({"mirror_timeout_s": 0}, "models.mirror_timeout_s"),
    ],
)
def test_wrong_field_is_named(models: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(**models)
    assert problem in str(raised.value)


def test_secrets_in_options_are_not_recorded() -> None:
    found = load(mirrors=[{"name": "mine.mirror:call", "options": {"api_token": "hush-hush"}}])
    assert "hush-hush" not in found.yaml_text and "hush-hush" not in repr(found)
    assert "hush-hush" in found.secrets
