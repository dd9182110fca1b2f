"""Checks of a configuration that need more than its fields."""

from __future__ import annotations

import importlib.metadata
import json
from collections import OrderedDict
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddptrain.config import plugin_names
from ddptrain.config.json_schema import config_schema
from ddptrain.config.sections.clusters import BACKENDS, ClusterConfig, provider_class
from ddptrain.errors import ConfigError, UsageError
from tests.docs.reference import TARGET, configuration_page

# --- Workloads and cluster backends by name ---


def test_what_is_only_checked_is_left_to_ranks_elsewhere() -> None:
    names, images = "ddptrain.workloads.petnames.names:check", "ddptrain.workloads.images.listing:prepare"
    mine = {"names": "mine.csv"}
    assert plugin_names.prepare_target("petnames", mine, here=True) == names
    assert plugin_names.prepare_target("petnames", mine, here=False) == ""
    assert plugin_names.prepare_target("petnames", {}, here=True) == ""
    assert plugin_names.prepare_target("petnames", {"names": "builtin"}, here=True) == ""
    assert (
        plugin_names.prepare_target("images", {}, here=True)
        == plugin_names.prepare_target("images", {}, here=False)
        == images
    )
    assert plugin_names.prepare_target("mine:train", mine, here=True) == ""


@pytest.mark.parametrize("name", ["a:", ":b", "a/b.py:main", "a.b:c:d", "a..b:c", "a b:c", "1a:b", "a:b\n"])
def test_a_malformed_target_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        plugin_names.workload_target(name)


def test_an_installed_package_offers_a_workload_without_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry_points(**wanted: Any) -> EntryPoints:
        points = EntryPoints([EntryPoint("birds", "not_there.train:run [extra]", plugin_names.WORKLOADS.group)])
        return points.select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert plugin_names.workload_target("birds") == "not_there.train:run"
    assert plugin_names.params_model("birds") is None
    with pytest.raises(ConfigError, match="did you mean birds"):
        plugin_names.workload_target("bird")


# --- cluster backends ---


def test_installed_package_offers_a_backend_which_is_imported_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry_points(**wanted: Any) -> EntryPoints:
        points = [
            EntryPoint("mine", "collections:OrderedDict", BACKENDS.group),
            EntryPoint("broken", "not_there.at_all:Provider", BACKENDS.group),
        ]
        return EntryPoints(points).select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert provider_class("mine") is OrderedDict
    assert ClusterConfig(backend="mine", kwargs={"size": 3}).kwargs == {"size": 3}
    with pytest.raises(UsageError, match=r"cluster\.backend broken .* can't be used: No module named 'not_there'"):
        provider_class("broken")
    with pytest.raises(ValidationError, match="there is no such cluster backend"):
        ClusterConfig(backend="min")


# --- configs/ddptrain.schema.json, which editors use, and docs/reference/configuration.md are current ---


CONFIGS = Path(__file__).parents[3] / "configs"


def test_schema_file_is_current() -> None:
    shipped = json.loads((CONFIGS / "ddptrain.schema.json").read_text(encoding="utf-8"))
    assert shipped == config_schema(), "run `make schema`"


def test_page_of_the_docs_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == configuration_page(config_schema()), "run `make schema`"


def test_each_field_has_a_description_of_its_own() -> None:
    schema = config_schema()
    owners = {"": schema, **schema["$defs"]}
    missing = [
        f"{owner}.{name}"
        for owner, content in owners.items()
        for name, field in content.get("properties", {}).items()
        if "$ref" in field and not field.get("description")
    ]
    assert missing == []
    assert schema["properties"]["cluster"]["description"] == "Where the ranks run, and how many there are."
