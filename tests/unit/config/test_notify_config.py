"""The section notify: what is accepted, and that no error and no record shows a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import ConfigError


def load(**notify: Any) -> ResolvedConfig:
    return load_mapping({"workload": "petnames", "notify": notify}, Path())


def test_one_url_needs_no_list() -> None:
    assert load(urls="slack://a/b/c").config.notify.urls == ["slack://a/b/c"]
    assert load(urls=["env:A_URL", "mailto://x"]).config.notify.urls == ["env:A_URL", "mailto://x"]
    assert load(heartbeat="https://host/x").config.notify.heartbeat == "https://host/x"
    assert load().config.notify.urls == []


APPRISE = "is not an Apprise URL (write it as mailto://..., or env:NAME)"
WEB = "is not a web server's URL (write it as https://..., or env:NAME)"
VARIABLE = "contains no variable name after env: (write it as env:SLACK_URL)"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("urls", "tokentoken", f"notify.urls: {APPRISE}"),
        ("urls", ["slack://a", "tokentoken"], f"notify.urls[1]: {APPRISE}"),
        ("urls", ["slack://tokentoken\n"], f"notify.urls[0]: {APPRISE}"),
        ("urls", [""], f"notify.urls[0]: {APPRISE}"),
        ("urls", ["env:"], f"notify.urls[0]: {VARIABLE}"),
        ("urls", ["env:https://tokentoken"], f"notify.urls[0]: {VARIABLE}"),
        ("urls", {"a": "tokentoken"}, "notify.urls: expected a list, got a mapping"),
        ("heartbeat", "ftp://tokentoken", f"notify.heartbeat: {WEB}"),
        ("heartbeat", "tokentoken", f"notify.heartbeat: {WEB}"),
        ("heartbeat", "https://", f"notify.heartbeat: {WEB}"),
        ("heartbeat", "", f"notify.heartbeat: {WEB}"),
        ("heartbeat", "env:1A", f"notify.heartbeat: {VARIABLE}"),
        ("timeout_s", 0, "notify.timeout_s: expected more than 0, got 0"),
    ],
)
def test_wrong_value_is_one_line_that_does_not_show_a_url(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{field: value})
    (found,) = caught.value.problems
    assert str(found).removeprefix(f"{found.where}: ") == problem
    assert "tokentoken" not in str(found)


def test_urls_are_recorded_nowhere() -> None:
    found = load(urls=["slack://tokentoken/b/c", "env:A_URL"], heartbeat="https://host/uuid-uuid")
    assert "tokentoken" not in found.yaml_text and "uuid-uuid" not in found.yaml_text
    assert "env:A_URL" in found.yaml_text
    assert {"slack://tokentoken/b/c", "https://host/uuid-uuid"} <= set(found.secrets)
    assert "tokentoken" not in repr(found) + repr(found.config)
