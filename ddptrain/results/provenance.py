"""Records the code of a run: the git commit, uncommitted changes, and the versions of installed packages."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from ddptrain.redact import KNOWN_FORMATS, LEFT_OUT, hide_credentials, hide_known, is_secret_file, is_secret_name
from ddptrain.results.run_record import EnvironmentValue, GitRecord

_GIT_TIMEOUT_S = 1.0
_MOST_DIFF_BYTES = 200_000
_LONGEST_LINE = 5_000  # characters of a line of a diff
# `api_key: x` in YAML, and `os.environ["API_KEY"] = "x"`; redact.py finds assignments to names.
_YAML_ENTRY = re.compile(r"""^(\s*(?:-\s+)?["']?)([\w.-]+)(["']?\s*:\s+)(?!["']?<left out>)(\S.*)""")
_QUOTED_NAME = re.compile(r"""(["'])([\w.-]+)(\1\s*\]?\s*[=,]\s*)("[^"]*"|'[^']*')""")
_PACKAGES = ("ddptrain", "torch", "distributed", "dask", "numpy", "safetensors")


def git_state(folder: Path) -> GitRecord | None:
    """Return the state of the git checkout of the folder; None without a checkout, without git, or after a timeout."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    data = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules")
    lines = data.decode(errors="replace").splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return None
    return GitRecord(commit=commits[0], dirty=any(not line.startswith("#") for line in lines))


def git_diff(folder: Path, secrets: Sequence[str] = ()) -> str:
    """Return the changes of tracked files since the commit, at most 200 kB, without secrets.

    Files that probably contain secrets, and binary files, are only named. Returns "" without changes, without git, or
    after a timeout. secrets: texts to leave out.
    """
    no_programs = ("--no-ext-diff", "--no-textconv")  # programs that git's configuration or attributes name
    options = ("--no-color", "--ignore-submodules", "--src-prefix=a/", "--dst-prefix=b/")
    data = _git(folder, "-c", "core.quotePath=false", "diff", "HEAD", *no_programs, *options, most=_MOST_DIFF_BYTES + 1)
    if not data:
        return ""
    is_cut = len(data) > _MOST_DIFF_BYTES
    text = data[:_MOST_DIFF_BYTES].decode("utf-8", "replace")
    text = text.rpartition("\n")[0] + "\n... (the rest is left out)\n" if is_cut else text
    return without_secrets_in_diff(text, secrets)


def without_secrets_in_diff(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a diff without the values of keys, tokens and passwords, and without the content of secret files."""
    shown = str(hide_known(KNOWN_FORMATS.sub(LEFT_OUT, text), secrets))
    return "".join(f"{line}\n" for line in _lines_without_secrets(shown))


def _lines_without_secrets(text: str) -> Iterator[str]:
    is_secret = False
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("diff --git "):
            is_secret = is_secret_file(line.rpartition(" b/")[2].rstrip('"'))
            yield line
            if is_secret:
                yield LEFT_OUT
        elif not is_secret:
            cut = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
            mark = cut[:1]  # "+", "-" or " "
            hidden = _QUOTED_NAME.sub(_hide_value, hide_credentials(cut[1:]))
            yield mark + _YAML_ENTRY.sub(_hide_value, hidden)


def _hide_value(part: re.Match[str]) -> str:
    return f"{part[1]}{part[2]}{part[3]}{LEFT_OUT}" if is_secret_name(part[2]) else part[0]


def _git(folder: Path, *arguments: str, most: int = -1) -> bytes:
    """Return the output of a git command, at most `most` bytes; nothing if it fails or takes longer than a second."""
    try:
        with subprocess.Popen(
            ["git", *arguments],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # a lock could block a git command of the user
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None, "a pipe"
            timer = threading.Timer(_GIT_TIMEOUT_S, process.kill)
            timer.start()
            data = process.stdout.read(most)
            if len(data) == most:
                process.kill()  # the rest is not read
            process.wait()
            timer.cancel()
    except OSError:
        return b""
    return data if process.returncode == 0 or len(data) == most else b""


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, without importing them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def without_secrets(environment: Mapping[str, EnvironmentValue]) -> dict[str, EnvironmentValue]:
    """Return the environment without the values of keys, tokens and passwords."""
    return {
        name: EnvironmentValue(LEFT_OUT if is_secret_name(name) else hide_credentials(entry.value), entry.source)
        for name, entry in environment.items()
    }
