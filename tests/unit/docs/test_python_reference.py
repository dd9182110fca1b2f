"""docs/reference/python.md and output.schema.json are current."""

from __future__ import annotations

from tests.docs import output_schema
from tests.docs.python_reference import TARGET, python_page


def test_page_of_the_python_api_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == python_page(), "make schema writes it anew"


def test_schema_of_the_output_is_current() -> None:
    assert output_schema.TARGET.read_text(encoding="utf-8") == output_schema.schema_text(), "make schema writes it anew"
