"""docs/reference/python.md is current."""

from __future__ import annotations

from tests.docs.python_reference import TARGET, python_page


def test_page_of_the_python_api_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == python_page(), "make schema writes it anew"
