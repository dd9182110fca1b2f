"""`make release-check TAG=v0.2.0`: checks that tag, version, changelog and wheel agree. It publishes nothing."""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import ddptrain

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?$", re.MULTILINE)
NEEDED_FILES = ("ddptrain/__init__.py", "ddptrain/py.typed", "ddptrain/configs/petnames.yaml")
UNWANTED_FOLDERS = ("tests/", "docs/", "runs/", ".ci/")


def changelog_problems(changelog: str, version: str) -> list[str]:
    """What is wrong with a Keep a Changelog file for the release `version`; empty if nothing is."""
    sections = [(match["version"], match["date"]) for match in _SECTION.finditer(changelog)]
    if not sections or sections[0][0] != "Unreleased":
        return ["CHANGELOG.md: the first section must be [Unreleased]"]
    dates = dict(sections[1:])
    if version not in dates:
        return [f"CHANGELOG.md: there is no section for {version}: rename [Unreleased] to [{version}] - DATE"]
    problems = []
    if sections[1][0] != version:
        problems.append(f"CHANGELOG.md: [{version}] is not the newest section, [{sections[1][0]}] is")
    try:
        dt.date.fromisoformat(dates[version] or "")
    except ValueError:
        problems.append(f"CHANGELOG.md: [{version}] has no date of the form YYYY-MM-DD, but {dates[version]!r}")
    unreleased = changelog.split("## [Unreleased]", 1)[1].split("\n## [", 1)[0].strip()
    if unreleased:
        problems.append(f"CHANGELOG.md: [Unreleased] still has entries; they belong to {version} or to a later release")
    return problems


def tag_problems(tag: str, version: str, tags_of_head: Sequence[str]) -> list[str]:
    """What is wrong with the tag of the release; the tag may be missing so far, but not be on another commit."""
    if tag != f"v{version}":
        return [f"the tag is {tag}, and ddptrain.__version__ is {version}: the tag must be v{version}"]
    others = [each for each in tags_of_head if each != tag]
    return [f"this commit is already released as {', '.join(others)}"] if others else []


def wheel_problems(names: Sequence[str], filename: str, version: str) -> list[str]:
    """What is wrong with the content of a wheel, given the names of its files."""
    problems = [] if f"-{version}-" in filename else [f"{filename}: the name does not have the version {version}"]
    problems += [f"{filename}: {name} is missing" for name in NEEDED_FILES if name not in names]
    problems += [f"{filename}: {name} does not belong into it" for name in names if name.startswith(UNWANTED_FOLDERS)]
    return problems


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def _tree_problems(tag: str) -> list[str]:
    problems = [f"not committed: {line}" for line in _git("status", "--porcelain")]
    if tag in _git("tag", "--list") and tag not in _git("tag", "--points-at", "HEAD"):
        problems.append(f"the tag {tag} is on another commit")
    return problems


def _built_wheel_problems(version: str) -> list[str]:
    """Build the wheel, look into it, install it into a new environment, and ask the command for its version."""
    with tempfile.TemporaryDirectory(prefix="ddptrain-release-") as folder:
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(ROOT)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            problems = wheel_problems(archive.namelist(), wheel.name, version)
        # The dependencies come from this environment: only what the wheel itself brings is checked.
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True, system_site_packages=False)
        python = environment / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
        site = next(path for path in sys.path if path.endswith("site-packages"))
        command = [str(environment / "bin" / "ddptrain"), "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": site}, cwd=folder)
        if shown.stdout.strip() != f"ddptrain {version}":
            problems.append(f"the installed wheel's `ddptrain --version` prints {shown.stdout + shown.stderr!r}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__)
    parser.add_argument("--tag", required=True, help="the tag of the release, v and the version")
    tag = parser.parse_args(arguments).tag
    version = ddptrain.__version__
    problems = tag_problems(tag, version, _git("tag", "--points-at", "HEAD"))
    problems += _tree_problems(tag)
    problems += changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    problems += _built_wheel_problems(version)
    for problem in problems:
        print(f"release-check: {problem}", file=sys.stderr)
    if not problems:
        print(f"release-check: {tag} may be released: git tag {tag} && git push origin {tag}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
