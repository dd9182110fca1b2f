"""Records the code of a run: the git commit that is checked out, and the versions of installed packages."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ddptrain.redact import LEFT_OUT, hide_credentials
from ddptrain.results.run_record import EnvironmentValue, GitRecord
from ddptrain.secret_rules import is_secret_name

_GIT_TIMEOUT_S = 1.0
_PACKAGES = ("ddptrain", "torch", "distributed", "dask", "numpy", "safetensors")


def git_state(folder: Path) -> GitRecord | None:
    """Return the state of the git checkout of the folder; None without one, without git, or after a timeout."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    # Without optional locks this never blocks a git command of the user.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=environment,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if done.returncode != 0 or not commits or commits[0] == "(initial)":
        return None
    return GitRecord(commit=commits[0], dirty=any(not line.startswith("#") for line in lines))


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, without importing them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def without_secrets(environment: Mapping[str, EnvironmentValue]) -> dict[str, EnvironmentValue]:
    """Return the environment without the values of keys, tokens and passwords."""
    return {
        name: EnvironmentValue(LEFT_OUT if is_secret_name(name) else hide_credentials(entry.value), entry.source)
        for name, entry in environment.items()
    }
