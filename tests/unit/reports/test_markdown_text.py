"""Text of others does not become Markdown."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from ddptrain.reports.markdown import cell, code, fenced, link, table


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a", "`a`"),
        ("", "`-`"),
        ("  ", "`-`"),
        ("a`b", "``a`b``"),
        ("`a``b", "``` `a``b ```"),
        ("a\nb\x1b[0m", "`a\\u000ab\\u001b[0m`"),
        ("@user <b> [x](y) | *z*", "`@user <b> [x](y) | *z*`"),
    ],
)
def test_code_is_one_span(text: str, markdown: str) -> None:
    assert code(text) == markdown


@pytest.mark.parametrize("text", ["a|b", "`|`", "| --- |", "<script>", "x\\|y", "**b**"])
def test_cell_keeps_its_table(text: str) -> None:
    html = MarkdownIt().enable("table").render(table(("a", "b"), [[cell(text), "1"]]))
    assert html.count("<td>") == 2
    shown = text.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<code>{shown}</code>" in html


def test_fence_is_longer_than_those_inside() -> None:
    html = MarkdownIt().render(fenced("a\n```\n# b\n````\n<b>\x1b"))
    assert (
        html
        == '<pre><code class="language-text">a\n```\n# b\n````\n&lt;b&gt;\N{REPLACEMENT CHARACTER}\n</code></pre>\n'
    )


@pytest.mark.parametrize("url", ["javascript:alert(1)", "https://a b", "https://a)", "https://a|b", "http://a\n"])
def test_only_plain_addresses_become_links(url: str) -> None:
    assert "](" not in link("x", url)
    assert link("x", "https://wandb.ai/a/b") == "[x](https://wandb.ai/a/b)"
