"""The release check: it refuses a release whose tag, changelog or wheel do not agree."""

from __future__ import annotations

import pytest

from tests.support.release import NEEDED_FILES, changelog_problems, tag_problems, wheel_problems

GOOD = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- x\n\n## [0.1.0] - 2026-11-21\n"


def test_changelog_with_dated_newest_section_passes() -> None:
    assert changelog_problems(GOOD, "0.2.0") == []


@pytest.mark.parametrize(
    ("changelog", "version", "expected"),
    [
        (GOOD, "0.3.0", "there is no section for 0.3.0"),
        (GOOD, "0.1.0", "is not the newest section"),
        (GOOD.replace(" - 2026-12-01", ""), "0.2.0", "no date of the form"),
        (GOOD.replace("2026-12-01", "soon"), "0.2.0", "no date of the form"),
        (GOOD.replace("## [0.2.0]", "- left over\n\n## [0.2.0]"), "0.2.0", "[Unreleased] still has entries"),
        ("# Changelog\n", "0.2.0", "the first section must be [Unreleased]"),
    ],
)
def test_changelog_that_does_not_fit_is_refused(changelog: str, version: str, expected: str) -> None:
    (problem,) = changelog_problems(changelog, version)
    assert expected in problem


@pytest.mark.parametrize(
    ("tag", "of_head", "expected"),
    [("v0.2.0", [], 0), ("v0.2.0", ["v0.2.0"], 0), ("0.2.0", [], 1), ("v0.2.1", [], 1), ("v0.2.0", ["v0.1.0"], 1)],
)
def test_tag_must_be_the_version(tag: str, of_head: list[str], expected: int) -> None:
    assert len(tag_problems(tag, "0.2.0", of_head)) == expected


def test_wheel_has_what_it_needs_and_no_tests() -> None:
    name = "ddptrain-0.2.0-py3-none-any.whl"
    assert wheel_problems(NEEDED_FILES, name, "0.2.0") == []
    assert wheel_problems(NEEDED_FILES[1:], name, "0.2.0") == [f"{name}: ddptrain/__init__.py is missing"]
    assert wheel_problems((*NEEDED_FILES, "tests/x.py"), name, "0.2.0") == [
        f"{name}: tests/x.py does not belong into it"
    ]
    assert len(wheel_problems(NEEDED_FILES, name, "0.2.1")) == 1
