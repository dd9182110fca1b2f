"""The page of the configuration's fields."""

from __future__ import annotations

from ddptrain.config.json_schema import config_schema
from tests.docs.reference import configuration_page

SCHEMA = {
    "$defs": {
        "Part": {
            "description": "A part.",
            "properties": {
                "size": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 31536000,
                    "default": 3,
                    "description": "How | many.",
                },
                "word": {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}], "default": None},
                "mode": {"enum": ["off", False], "default": "off"},
                "inner": {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}], "default": None},
            },
            "required": ["word"],
        },
        "Inner": {"properties": {"names": {"type": "array", "items": {"type": "string"}}}},
        "toy.params": {"properties": {"lr": {"type": "number", "exclusiveMinimum": 0, "default": 0.1}}},
    },
    "properties": {
        "name": {"type": "string", "description": "The name."},
        "part": {"$ref": "#/$defs/Part", "default": {}},
    },
    "required": ["name"],
}


def test_fields_sections_and_params_have_rows() -> None:
    page = configuration_page(SCHEMA)
    rows = [line for line in page.splitlines() if line.startswith(("| `", "##"))]
    assert rows == [
        "## The file",
        "| `name` | string | required | The name. |",
        "## `part`",
        "| `part.size` | integer, at least 1, at most 31,536,000 | `3` | How \\| many. |",
        "| `part.word` | `a`, `b` or null | required |  |",
        '| `part.mode` | `off`, `false` | `"off"` |  |',
        "| `part.inner` | section or null | `null` |  |",
        "### `part.inner`",
        "| `part.inner.names` | list of string |  |  |",
        "## `params` of `toy`",
        "| `params.lr` | number, above 0 | `0.1` |  |",
    ]
    assert "A part." in page


def test_every_section_of_the_configuration_is_on_the_page() -> None:
    schema = config_schema()
    page = configuration_page(schema)
    assert [name for name in schema["properties"] if f"`{name}`" not in page] == []
    assert "| `checkpoint.keep` | integer, at least 1 | `3` |" in page
    assert "| `workload` | " in page
