"""Workloads and cluster backends by name."""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from pydantic import ValidationError

from ddptrain.config import plugin_names
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ConfigError, UsageError


def test_a_built_in_workload_has_a_target_and_a_strict_params_model() -> None:
    assert plugin_names.workload_target("petnames") == "ddptrain.workloads.petnames.train:train"
    model = plugin_names.params_model("petnames")
    assert model is not None
    assert model.model_config.get("extra") == "forbid"


def test_what_is_only_checked_is_left_to_ranks_elsewhere() -> None:
    names, images = "ddptrain.workloads.petnames.names:check", "ddptrain.workloads.images.data.listing:prepare"
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


@pytest.mark.parametrize("name", ["train:main", "my_package.training:Trainer.fit"])
def test_a_function_of_the_users_is_taken_as_it_is(name: str) -> None:
    assert plugin_names.workload_target(name) == name
    assert plugin_names.params_model(name) is None


@pytest.mark.parametrize("name", ["a:", ":b", "a/b.py:main", "a.b:c:d", "a..b:c", "a b:c", "1a:b", "a:b\n"])
def test_a_malformed_target_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        plugin_names.workload_target(name)


def test_a_misspelt_workload_names_the_nearest_one_and_all_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        plugin_names.params_model("pet-name")
    assert str(caught.value).startswith('workload "pet-name": there is no such workload')
    assert "did you mean petnames?" in str(caught.value)


def test_an_installed_package_offers_a_workload_without_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry_points(**wanted: Any) -> EntryPoints:
        points = EntryPoints([EntryPoint("birds", "not_there.train:run [extra]", plugin_names.ENTRY_POINT_GROUP)])
        return points.select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert plugin_names.workload_target("birds") == "not_there.train:run"
    assert plugin_names.params_model("birds") is None
    with pytest.raises(ConfigError, match="did you mean birds"):
        plugin_names.workload_target("bird")


# --- cluster backends ---


@pytest.mark.parametrize("backend", [name for name, target in plugin_names.BACKENDS.items() if target])
def test_class_of_every_backend_is_found(backend: str) -> None:
    made = plugin_names.provider_class(backend)()
    assert all(callable(getattr(made, method)) for method in ("start", "fault", "logs", "stop", "reopen"))


def test_backend_that_starts_nothing_says_so() -> None:
    with pytest.raises(UsageError, match="address uses a cluster that is up"):
        plugin_names.provider_class("address")


def test_installed_package_offers_a_backend_which_is_imported_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry_points(**wanted: Any) -> EntryPoints:
        points = [
            EntryPoint("mine", "collections:OrderedDict", plugin_names.BACKEND_GROUP),
            EntryPoint("broken", "not_there.at_all:Provider", plugin_names.BACKEND_GROUP),
        ]
        return EntryPoints(points).select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert plugin_names.provider_class("mine") is OrderedDict
    assert ClusterConfig(backend="mine", kwargs={"size": 3}).kwargs == {"size": 3}
    with pytest.raises(UsageError, match=r"cluster\.backend broken .* can't be used: No module named 'not_there'"):
        plugin_names.provider_class("broken")
    with pytest.raises(ValidationError, match="there is no such cluster backend"):
        ClusterConfig(backend="min")
