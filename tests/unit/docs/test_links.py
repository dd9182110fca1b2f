"""Links of repository files become links of pages."""

from __future__ import annotations

import pytest

from tests.docs.links import site_links

FILES = {"docs/ci.md", "docs/clusters/index.md", "docs/images/a.svg", "configs/petnames.yaml", "docs/start/script.md"}


@pytest.mark.parametrize(
    ("source", "page", "text", "wanted"),
    [
        ("README.md", "index.md", "[CI](docs/ci.md#a)", "[CI](ci.md#a)"),
        ("README.md", "index.md", "![a](docs/images/a.svg)", "![a](images/a.svg)"),
        ("README.md", "index.md", "[S](SECURITY.md)", "[S](security.md)"),
        ("README.md", "index.md", "[the file](configs/petnames.yaml)", "the file"),
        ("README.md", "index.md", "[web](https://example.org) [here](#x)", "[web](https://example.org) [here](#x)"),
        ("docs/clusters/index.md", "clusters/index.md", "[S](../../SECURITY.md#b)", "[S](../security.md#b)"),
        ("docs/clusters/index.md", "clusters/index.md", "[s](../start/script.md)", "[s](../start/script.md)"),
        ("docs/ci.md", "ci.md", "[gone](gone.md)", "[gone](gone.md)"),
    ],
)
def test_links_lead_to_pages(source: str, page: str, text: str, wanted: str) -> None:
    assert site_links(text, source, page, FILES.__contains__) == wanted
