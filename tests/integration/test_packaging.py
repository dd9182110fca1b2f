"""The wheel and the source archive hold everything, and the wheel works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.release import version_of_the_package

ROOT = Path(__file__).parents[2]
VERSION = version_of_the_package()
SOURCES = {f"ddptrain/{path.relative_to(ROOT / 'ddptrain')}" for path in (ROOT / "ddptrain").rglob("*.py")}
CONFIGS = {path.name for path in (ROOT / "configs").iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it; no index was asked."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin of a virtual environment with the wheel; dependencies are borrowed from the one under test."""
    venv = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    site = sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)})
    # As plain folders on sys.path: their .pth files, which would lead to the checkout, are not read.
    borrowed = "\n".join(path for path in sys.path if Path(path).name == "site-packages")
    Path(site, "borrowed.pth").write_text(f"{borrowed}\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv,
        "install",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        wheel,
    )
    return venv / "bin"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What the command printed on stdout; fails the test if it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    extra = {"ddptrain/py.typed", "ddptrain/workloads/petnames/names.txt"}
    extra |= {"ddptrain/starter/gitignore", "ddptrain/starter/train.yaml", "ddptrain/starter/script.yaml"}
    extra |= {f"ddptrain-{VERSION}.data/data/share/man/man1/ddptrain.1"}
    of_page = [*(f"static/{name}" for name in ("chart.js", "curves.js", "page.js", "page.css"))]
    of_page += [f"static/uplot/{name}" for name in ("LICENSE", "uPlot.iife.min.js", "uPlot.min.css")]
    of_page += [
        f"templates/{name}.html.j2" for name in ("curves", "list", "models", "page", "parts", "run", "runs", "sweep")
    ]
    extra |= {f"ddptrain/reports/{name}" for name in of_page}
    extra |= {f"ddptrain/schedule/templates/{name}.j2" for name in ("cron.sh", "service", "timer")}
    extra |= {"ddptrain/troubleshooting.md"}  # whose sections `ddptrain explain` prints
    assert CONFIGS
    assert names == SOURCES | extra | {f"ddptrain/configs/{name}" for name in CONFIGS}


def test_wheel_brings_the_license_and_the_command(wheel: Path) -> None:
    info = f"ddptrain-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
        assert "ddptrain = ddptrain.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_metadata_is_complete(wheel: Path) -> None:
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == ("ddptrain", VERSION)
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown"
    assert about["Summary"] and about["Keywords"] and about.get_payload()
    assert "Typing :: Typed" in about.get_all("Classifier", [])


def test_dependencies_have_lower_bounds_and_no_upper_ones(wheel: Path) -> None:
    needed = [text for text in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in text]
    assert needed and all(">=" in text for text in needed), needed
    assert not [text for text in needed if "<" in text.split(";")[0]]


def test_source_archive_is_enough_to_build_test_and_lint(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        ".ci/run",
        "tests/conftest.py",
    }
    assert wanted | SOURCES | {f"configs/{name}" for name in CONFIGS} <= names
    assert not [name for name in names if name.startswith((".venv", "runs", "dist"))]


def test_installed_command_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "ddptrain", "--version", cwd=tmp_path) == f"ddptrain {VERSION}\n"
    assert run(installed / "python", "-m", "ddptrain", "--version", cwd=tmp_path).startswith("ddptrain ")


def test_installed_package_is_the_wheel_s(installed: Path, tmp_path: Path) -> None:
    found = run(installed / "python", "-c", "import ddptrain; print(ddptrain.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parent)


def test_installed_example_is_trained_by_its_name(installed: Path, tmp_path: Path) -> None:
    assert "workload: petnames" in run(installed / "ddptrain", "train", "petnames", "--dry-run", cwd=tmp_path)


def test_installed_names_are_read(installed: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "print(len((files('ddptrain.workloads.petnames') / 'names.txt').read_text(encoding='utf-8').split()))"
    )
    assert int(run(installed / "python", "-c", code, cwd=tmp_path)) >= 1000
