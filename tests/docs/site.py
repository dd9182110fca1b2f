"""The hook of mkdocs.yml: pages that are made at build time, links to repository files, llms.txt, Markdown copies."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import typer.cli
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads a hook by its path

from ddptrain.cli.main import PROGRAM, app  # noqa: E402
from tests.docs.links import PAGES, site_links  # noqa: E402

_SOURCES = {page: file for file, page in PAGES.items()}
# @mermaid-js/tiny 11.17.2 (MIT), compressed. The theme loads mermaid from another host; the site asks none.
_MERMAID = ROOT / "tests" / "docs" / "mermaid" / "mermaid.tiny.js.gz"
_REMOTE_MERMAID = re.compile(r'"https://unpkg\.com/mermaid@[^"]+"')
_OWN_MERMAID = """new URL("mermaid.js",document.querySelector('script[src*="javascripts/bundle."]').src).href"""
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:)?//|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|preload)["']?[^>]*\bhref=["']?(https?:)?//"""
)
# Pages that have moved: their old addresses lead to the new ones.
_MOVED = {
    "clusters/local": "clusters/#this-machine",
    "clusters/address": "clusters/#a-running-dask-cluster",
    "clusters/ssh": "clusters/#ssh",
    "clusters/class": "clusters/#other-clouds",
    "scale": "clusters/#check-the-machines",
    "compare": "results/",
    "reports": "results/#pages-in-a-browser",
    "cleanup": "results/#cleanup-old-runs-and-versions",
    "evaluation": "models/#evaluation-scores-on-held-out-data",
    "reference/run-directory": "reference/events/",
}
_written: dict[str, tuple[str, str]] = {}  # page -> title, Markdown


def _commands_page() -> str:
    """Every command with its options, as its parser knows them."""
    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name=PROGRAM)
    return text.replace(f"# `{PROGRAM}`", "# Commands", 1)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files below docs/."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for file, page in PAGES.items()}
    pages["reference/commands.md"] = _commands_page()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to pages, and keep the text for the Markdown copy."""
    name = page.file.src_uri
    source = _SOURCES.get(name, f"docs/{name}")
    exists = {f"docs/{file.src_uri}" for file in files}
    text = site_links(markdown, source, name, lambda path: path in exists or (ROOT / path).exists())
    _written[name] = (str(page.title), text)
    return text


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Remember the order of the pages for llms.txt."""
    _written.clear()
    _written.update({page.file.src_uri: ("", "") for page in nav.pages})
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write a Markdown copy of each page, and llms.txt with links to them (https://llmstxt.org)."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for page, (title, text) in _written.items():
        copy = site / page
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        lines.append(f"- [{title}]({page})")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    for old, new in _MOVED.items():
        target = site / old / "index.html"
        target.parent.mkdir(parents=True)
        address = "../" * len(Path(old).parts) + new
        target.write_text(f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">{address}</a>\n')
    _use_own_mermaid(site / "assets" / "javascripts")
    _refuse_other_hosts(site)


def _use_own_mermaid(folder: Path) -> None:
    """Let the theme load mermaid from the site, on pages with diagrams. Raises PluginError if the theme has changed."""
    (bundle,) = folder.glob("bundle.*.js")
    text, count = _REMOTE_MERMAID.subn(lambda _: _OWN_MERMAID, bundle.read_text(encoding="utf-8"))
    if count != 1:
        raise PluginError(f"{bundle.name} names the address of mermaid {count} times, not once: see tests/docs/site.py")
    bundle.write_text(text, encoding="utf-8")
    (folder / "mermaid.js").write_bytes(gzip.decompress(_MERMAID.read_bytes()))
    (folder / "mermaid.LICENSE").write_bytes(_MERMAID.with_name("LICENSE").read_bytes())


def _refuse_other_hosts(site: Path) -> None:
    """Raise PluginError if a page loads a script, a style or a picture from another host."""
    for page in sorted(site.rglob("*.html")):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads something from another host: {found.group()}")
