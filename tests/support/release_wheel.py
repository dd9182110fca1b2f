"""What the archives of a release must have: size, metadata as an index demands it, licences, the documented extras."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MOST_BYTES = 2_000_000
_HEADERS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
# Scripts and styles of other authors carry such a line, which minifiers keep.
_FOREIGN = re.compile(rb"/\*!|@license|@preserve|\(c\)\s|Copyright", re.IGNORECASE)


def archive_problems(wheel: Path, sdist: Path, project: Mapping[str, Any]) -> list[str]:
    """What is wrong with the built archives; empty if nothing is."""
    problems = size_problems(wheel.name, wheel.stat().st_size)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        assets = {name: archive.read(name) for name in names if name.endswith((".js", ".css"))}
    problems += metadata_problems(text, project)
    problems += licence_problems(names, assets)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("PKG-INFO", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "tests/support/release.py")
    return problems + [f"{sdist.name}: {name} is missing" for name in needed if name not in inside]


def size_problems(name: str, size: int) -> list[str]:
    """Whether the wheel is too large."""
    return [f"{name} has {size:,} bytes, more than {MOST_BYTES:,}"] if size > MOST_BYTES else []


def metadata_problems(text: str, project: Mapping[str, Any]) -> list[str]:
    """What an index would refuse, or what differs from the project's own data."""
    try:
        Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        return [f"METADATA: {error}" for error in errors.exceptions]
    about = Parser().parsestr(text)
    problems = [f"METADATA: {name} is missing" for name in _HEADERS if not about[name]]
    problems += [] if about.get_payload() else ["METADATA: there is no description"]
    return problems + extra_problems(about, project)


def extra_problems(about: Message, project: Mapping[str, Any]) -> list[str]:
    """Whether each extra of the project is in the wheel, with all that it needs."""
    needed = [Requirement(text) for text in about.get_all("Requires-Dist", [])]
    problems = []
    for extra, wanted in project["optional-dependencies"].items():
        has = {canonicalize_name(each.name) for each in needed if _belongs(each, extra)}
        # An extra that takes in another one of the project has all of its requirements in the metadata.
        missing = {canonicalize_name(Requirement(text).name) for text in wanted} - {project["name"]} - has
        problems += [f"METADATA: the extra {extra} lacks {name}" for name in sorted(missing)]
    return problems


def _belongs(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def licence_problems(names: Sequence[str], assets: Mapping[str, bytes]) -> list[str]:
    """Whether the licence is there, and that of each script or style of another author."""
    problems = [] if any(name.endswith("/licenses/LICENSE") for name in names) else ["the wheel has no LICENSE"]
    foreign = [name for name, content in assets.items() if _FOREIGN.search(content)]
    licences = {Path(name).name for name in names if "licen" in name.lower()}
    return problems + [
        f"{name} is of another author, and {Path(name).stem}.LICENSE is missing"
        for name in foreign
        if f"{Path(name).stem}.LICENSE" not in licences
    ]
