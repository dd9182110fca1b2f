"""Installs a wheel with its dependencies into empty environments, one for each Python, and runs the README there."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
MOST_IMPORT_S, MOST_HELP_S = 0.05, 0.15
_TRIES = 7


def find_python(version: str) -> Path | None:
    """Return a Python of that version: this one, one on PATH, or one of pyenv or uv; None if there is none."""
    candidates = [Path(sys.executable)] if sys.version.startswith(f"{version}.") else []
    candidates += [Path(found) for found in [shutil.which(f"python{version}")] if found]
    homes = (Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python")
    candidates += [path for home in homes for path in sorted(home.glob(f"*{version}.*/bin/python{version}"))]
    return next((path for path in candidates if _works(path, version)), None)


def _works(python: Path, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version


def environment_problems(wheel: Path, folder: Path) -> list[str]:
    """Install and try the wheel with each Python that is there; those that are missing are named on stderr."""
    problems = []
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            print(f"release: Python {version} is not installed: skipped", file=sys.stderr)
            continue
        print(f"release: Python {version}: installing into an empty environment", file=sys.stderr)
        problems += [f"Python {version}: {text}" for text in _problems(python, wheel, folder / f"py{version}")]
    return problems


def _problems(python: Path, wheel: Path, folder: Path) -> list[str]:
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin" / "python"
    # uv links the files of its cache: torch is unpacked once. That pip installs the wheel, release.py has checked.
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(inside), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        return [f"the installation failed: {done.stderr.strip()[-500:]}"]
    problems = []
    start_s = cpu_s([str(inside), "-c", "pass"])
    if (import_s := cpu_s([str(inside), "-c", "import ddptrain"]) - start_s) > MOST_IMPORT_S:
        problems.append(f"import ddptrain takes {import_s:.3f} s of CPU, more than {MOST_IMPORT_S}")
    if (help_s := cpu_s([str(folder / "bin" / "ddptrain"), "--help"])) > MOST_HELP_S:
        problems.append(f"ddptrain --help takes {help_s:.3f} s of CPU, more than {MOST_HELP_S}")
    print(f"release: import {import_s:.3f} s, --help {help_s:.3f} s of CPU", file=sys.stderr)
    return problems + readme_problems(folder / "bin", folder / "work")


def readme_problems(bin_dir: Path, work: Path) -> list[str]:
    """Run the commands of the README's section "Three commands" in an empty folder."""
    work.mkdir()
    environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "WANDB_MODE": "disabled"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    problems = []
    for command in readme_commands((ROOT / "README.md").read_text(encoding="utf-8")):
        done = subprocess.run(["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            problems.append(f"README: {command}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return problems


def readme_commands(readme: str) -> list[str]:
    """The commands of the section "Three commands"."""
    section = readme.partition("## Three commands")[2].partition("\n## ")[0]
    return re.findall(r"^\$ (ddptrain .*)$", section, re.MULTILINE)


def cpu_s(command: list[str]) -> float:
    """The least seconds of CPU of some starts."""
    return min(_cpu_s(command) for _ in range(_TRIES))


def _cpu_s(command: list[str]) -> float:
    # The first start compiles, as an installation with pip does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
