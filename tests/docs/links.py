"""Links between files of the repository, as links between pages of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

# Files outside of docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_OTHER = ("http://", "https://", "mailto:", "#")


def site_links(markdown: str, source: str, page: str, exists: Callable[[str], bool]) -> str:
    """Return the text of a repository file as text of a page: its links lead to pages.

    `source` is the file ("docs/ci.md"), `page` its page ("ci.md"); `exists` tells whether the repository has a file.
    A link to a file that is no page becomes text. A link that leads nowhere stays: the build reports it.
    """

    def changed(match: re.Match[str]) -> str:
        target, text = match["target"], match["text"]
        if target.startswith(_OTHER):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if file in PAGES:
            file = f"docs/{PAGES[file]}"
        elif not exists(file):
            return match[0]
        if not file.startswith("docs/"):
            return text
        here = posixpath.dirname(page) or "."
        return f"{match['image']}[{text}]({posixpath.relpath(file[5:], here)}{hash_sign}{anchor})"

    return _LINK.sub(changed, markdown)
