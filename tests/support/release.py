"""`make release TAG=v0.2.0`, a dry run: checks tag, version, changelog, source archive and wheel. It publishes nothing.

The wheel is installed with its dependencies into an empty environment of each Python that is supported and there, and
runs the console blocks of the README. `make release-check` checks the same without these environments.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.support.release_environments import environment_problems
from tests.support.release_wheel import archive_problems

ROOT = Path(__file__).parents[2]
_SECTION = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?$", re.MULTILINE)
NEEDED_FILES = (
    "ddptrain/version.py",
    "ddptrain/configs/petnames.yaml",
    "ddptrain/py.typed",
)
UNWANTED_FOLDERS = ("tests/", "docs/", "runs/", ".ci/")


def version_of_the_package() -> str:
    """`ddptrain.__version__`, without an import of the package."""
    source = (ROOT / "ddptrain" / "version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(found)


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


def citation_problems(citation: Mapping[str, object], version: str, released: str | None) -> list[str]:
    """What is wrong with CITATION.cff for a release on the day `released` (YYYY-MM-DD)."""
    missing = [name for name in ("cff-version", "message", "title", "authors", "license") if not citation.get(name)]
    problems = [f"CITATION.cff: {name} is missing" for name in missing]
    if citation.get("version") != version:
        problems.append(f"CITATION.cff: the version is {citation.get('version')}, not {version}")
    if (date := citation.get("date-released")) is not None and str(date) != released:
        problems.append(f"CITATION.cff: date-released is {date}, and CHANGELOG.md says {released}")
    return problems


def release_date(changelog: str, version: str) -> str | None:
    """The date of the section of that version."""
    return {match["version"]: match["date"] for match in _SECTION.finditer(changelog)}.get(version)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def _tree_problems(tag: str) -> list[str]:
    problems = [f"not committed: {line}" for line in _git("status", "--porcelain")]
    if tag in _git("tag", "--list") and tag not in _git("tag", "--points-at", "HEAD"):
        problems.append(f"the tag {tag} is on another commit")
    return problems


def _built_problems(version: str, folder: Path, *, complete: bool) -> list[str]:
    """Build both archives, look into them, and install the wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        problems = wheel_problems(archive.namelist(), wheel.name, version)
    problems += archive_problems(wheel, sdist, project)
    problems += _installed_problems(wheel, version, folder)
    return problems + (environment_problems(wheel, folder) if complete and not problems else [])


def _installed_problems(wheel: Path, version: str, folder: Path) -> list[str]:
    """Install the wheel alone into a new environment, and ask the command for its version."""
    # The dependencies come from this environment: only what the wheel itself brings is checked.
    environment = folder / "venv"
    venv.create(environment, with_pip=True, system_site_packages=False)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    command = [str(environment / "bin" / "ddptrain"), "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": site}, cwd=folder)
    if shown.stdout.strip() == f"ddptrain {version}":
        return []
    return [f"the installed wheel's `ddptrain --version` prints {shown.stdout + shown.stderr!r}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--tag", required=True, help="the tag of the release, v and the version")
    parser.add_argument("--quick", action="store_true", help="do not install the dependencies")
    options = parser.parse_args(arguments)
    tag, version = options.tag, version_of_the_package()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    problems = tag_problems(tag, version, _git("tag", "--points-at", "HEAD"))
    problems += _tree_problems(tag)
    problems += changelog_problems(changelog, version)
    problems += citation_problems(citation, version, release_date(changelog, version))
    with tempfile.TemporaryDirectory(prefix="ddptrain-release-") as folder:
        problems += _built_problems(version, Path(folder), complete=not options.quick)
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if not problems:
        print(f"release: {tag} may be released: git tag {tag} && git push origin {tag}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
