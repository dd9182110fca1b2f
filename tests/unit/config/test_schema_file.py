"""configs/ddptrain.schema.json, which editors use, and docs/reference/configuration.md are current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.config.json_schema import config_schema
from tests.docs.reference import TARGET, configuration_page

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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_names_the_schema_for_editors(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=ddptrain.schema.json\n")
