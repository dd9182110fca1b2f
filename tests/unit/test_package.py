"""What messages, documents and the package's own data say of it agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

import ddptrain
from ddptrain.cli.main import app
from ddptrain.config.sections.tracking import TRACKER_EXTRAS, TRACKERS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

USERS_FILES = {"digits.py", "json.py", "pydantic.py", "train.py"}  # in examples


def test_every_extra_that_is_recommended_exists() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.*")]
    files += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "ddptrain").rglob("*.py")]
    named = re.compile(r"ddptrain\[([^\]{]+)\]|install_command\([\"'](\w+)[\"']\)")
    found = {
        (path.relative_to(ROOT).as_posix(), match[1] or match[2])
        for path in files
        for match in named.finditer(path.read_text(encoding="utf-8"))
    }
    assert len({path for path, _ in found if path.startswith("ddptrain/")}) > 2
    assert [each for each in sorted(found) if each[1] not in PROJECT["optional-dependencies"]] == []


def test_files_that_comments_and_design_pages_name_exist() -> None:
    pages = (
        ROOT / "CONTRIBUTING.md",
        ROOT / "docs/design.md",
        ROOT / "docs/glossary.md",
        *(ROOT / "docs/adr").glob("*.md"),
    )
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    comments = re.compile(r'(?<=#)[^\n]*|(?s:""".*?""")')
    for path in (ROOT / "ddptrain").rglob("*.py"):
        texts[path] = "\n".join(comments.findall(path.read_text(encoding="utf-8")))
    folders = "ddptrain", "tests", "examples", "docs"
    there = {file.name for folder in folders for file in (ROOT / folder).rglob("*.py")} | USERS_FILES
    named = re.compile(r"(?<![\w.*])(?:[\w-]+/)*([a-z_][a-z0-9_-]*\.py)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts.items()
        for match in named.finditer(text)
        if match[1] not in there and not match[0].startswith("distributed/")
    ]
    assert missing == []


def test_names_in_the_pages_about_the_code_are_names_of_the_code() -> None:
    of_examples = {"NAME", "VERSION", "max_memory_gb"}
    files = [path for folder in ("ddptrain", "tests") for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run", *(ROOT / "configs").glob("*.yaml")]
    words = {word for path in files for word in re.findall(r"\w+", f"{path} {path.read_text(errors='replace')}")}
    missing = {
        name
        for page in ("docs/design.md", "CONTRIBUTING.md")
        for name in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL))
        if not any(each in name for each in of_examples) and not words.issuperset(re.findall(r"\w{2,}", name))
    }
    assert missing == set()


def test_package_of_every_tracker_is_installed_or_in_its_extra() -> None:
    always = {Requirement(text).name for text in PROJECT["dependencies"]}
    for tracker in TRACKERS.built_in:
        extra = TRACKER_EXTRAS.get(tracker)
        packages = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]} if extra else always
        assert tracker in packages


def test_systems_that_are_claimed_are_those_that_are_tested() -> None:
    systems = [text for text in PROJECT["classifiers"] if text.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert "It needs Linux" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_dockerfile_has_no_findings() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_job_of_the_kubernetes_page_is_valid_and_its_command_is_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters" / "kubernetes.md").read_text(encoding="utf-8")
    (job,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL))
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, *words = container["args"]
    mounted = container["volumeMounts"][0]["mountPath"]
    local = [str(tmp_path) if word == mounted else word for word in words]
    assert (program, words[words.index("--runs-dir") + 1]) == ("ddptrain", mounted)
    assert CliRunner().invoke(app, [*local, "--dry-run"]).exit_code == 0


def test_citation_names_version_and_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (ddptrain.__version__, PROJECT["license"])
    assert citation["abstract"] == f"{PROJECT['description']}."


def test_readme_is_short_and_shows_a_recording_and_a_report() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.encode()) <= 7000
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    assert pictures == ["docs/images/restart.svg", "docs/images/ui.png"]
    assert sum((ROOT / picture).stat().st_size for picture in pictures) <= 1_500_000


def test_all_public_names_can_be_imported() -> None:
    assert [name for name in ddptrain.__all__ if getattr(ddptrain, name, None) is None] == []
    assert ddptrain.TrainingFailed.exit_code == 1
