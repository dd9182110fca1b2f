"""What a wheel must have to be released, and the commands of the README that are tried."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.release import citation_problems, release_date
from tests.support.release_environments import find_python, readme_commands
from tests.support.release_wheel import MOST_BYTES, licence_problems, metadata_problems, size_problems

PROJECT = {"name": "ddptrain", "optional-dependencies": {"s3": ["s3fs>=2025.2"], "all": ["ddptrain[s3]", "Types_X"]}}
GOOD = """\
Metadata-Version: 2.4
Name: ddptrain
Version: 1.0
Summary: Trains
License-Expression: Apache-2.0
Requires-Python: >=3.11
Description-Content-Type: text/markdown
Provides-Extra: s3
Provides-Extra: all
Requires-Dist: s3fs>=2025.2; extra == "s3"
Requires-Dist: s3fs>=2025.2; extra == "all"
Requires-Dist: types-x; extra == "all"

# ddptrain
"""


def test_complete_metadata_pass() -> None:
    assert metadata_problems(GOOD, PROJECT) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Summary: Trains\n", "", "METADATA: Summary is missing"),
        ("# ddptrain\n", "", "METADATA: there is no description"),
        ('Requires-Dist: s3fs>=2025.2; extra == "s3"\n', "", "METADATA: the extra s3 lacks s3fs"),
        ("text/markdown", "text/word", "text/word"),
        ("Version: 1.0", "Version: one", "'one' is invalid for 'version'"),
    ],
)
def test_metadata_that_lack_something_are_refused(old: str, new: str, expected: str) -> None:
    (problem,) = metadata_problems(GOOD.replace(old, new), PROJECT)
    assert expected in problem


def test_script_of_another_author_needs_its_licence() -> None:
    names = ["x.dist-info/licenses/LICENSE", "static/own.js", "static/lib.js"]
    assets = {"static/own.js": b"// draws a chart", "static/lib.js": b"/*! lib 1.0, (c) somebody */"}
    (problem,) = licence_problems(names, assets)
    assert problem.startswith("static/lib.js is of another author")
    assert licence_problems([*names, "static/lib.LICENSE"], assets) == []
    assert licence_problems(names[1:2], {}) == ["the wheel has no LICENSE"]


def test_wheel_has_a_limit() -> None:
    assert size_problems("w.whl", MOST_BYTES) == []
    assert size_problems("w.whl", MOST_BYTES + 1) == [f"w.whl has {MOST_BYTES + 1:,} bytes, more than {MOST_BYTES:,}"]


def test_citation_has_version_and_date_of_the_release() -> None:
    citation = {"cff-version": "1.2.0", "message": "m", "title": "t", "authors": [{}], "license": "x", "version": "1.0"}
    assert citation_problems(citation, "1.0", "2026-12-01") == []
    assert citation_problems({**citation, "date-released": "2026-11-01"}, "1.0", "2026-12-01") == [
        "CITATION.cff: date-released is 2026-11-01, and CHANGELOG.md says 2026-12-01"
    ]
    assert citation_problems({**citation, "version": "0.9", "title": ""}, "1.0", None) == [
        "CITATION.cff: title is missing",
        "CITATION.cff: the version is 0.9, not 1.0",
    ]
    assert release_date("## [Unreleased]\n\n## [1.0] - 2026-12-01\n", "1.0") == "2026-12-01"


def test_commands_of_the_readme_are_found() -> None:
    commands = readme_commands((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"))
    assert len(commands) == 3 and commands[0].startswith("ddptrain train petnames")


def test_python_is_found_by_its_version() -> None:
    assert find_python(f"{sys.version_info.major}.{sys.version_info.minor}") == Path(sys.executable)
    assert find_python("3.99") is None
