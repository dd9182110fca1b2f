"""What of a project goes along to workers that don't see its folder, and in which form."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pathspec

from ddptrain.codefolder import content_hash, kind_of, line_of
from ddptrain.configfile import LoadedConfig
from ddptrain.errors import UsageError
from ddptrain.registry import workload_target
from ddptrain.signatures import find_source

IGNORE_FILE = ".ddptrainignore"
# Never code, or not to be on other machines; in gitignore's own syntax.
_LEFT_OUT = """
.git/
.hg/
.svn/
.venv/
venv/
node_modules/
__pycache__/
*.pyc
.mypy_cache/
.pytest_cache/
.ruff_cache/
.ipynb_checkpoints/
.env
.env.*
.netrc
*.pem
*.key
id_rsa*
id_ed25519*
""".splitlines()
_GIT_TIMEOUT_S = 30.0
_MB = 1_000_000
_NAMED = 5  # of the largest files


@dataclass(frozen=True, slots=True)
class Project:
    """The folder of a user's code, and the file of it that is the workload."""

    folder: Path
    file: Path


@dataclass(frozen=True)
class Package:
    """The files of a project: size in bytes, by path below its folder."""

    folder: Path
    sizes: Mapping[str, int]

    @cached_property
    def names(self) -> list[str]:
        """The files' paths below the folder, in order."""
        return sorted(self.sizes)

    @cached_property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(self.sizes.values())

    @cached_property
    def hash(self) -> str:
        """Of all that the files are. Raises UsageError where one can't be read."""
        with _naming():
            return content_hash(self.folder, self.names)

    def check_size(self, max_mb: float) -> None:
        """Raise UsageError, with the largest files, where they are more than `max_mb`."""
        if self.size_bytes <= max_mb * _MB:
            return
        largest = sorted(self.sizes, key=lambda name: -self.sizes[name])[:_NAMED]
        named = ", ".join(f"{name} ({self.sizes[name] / _MB:.1f} MB)" for name in largest)
        raise UsageError(
            f"the project folder {self.folder} would go along to workers that don't see it, and has "
            f"{self.size_bytes / _MB:.1f} MB, over code.max_mb, which is {max_mb:g}; the largest files: {named}. List "
            f"what is not needed in {self.folder / IGNORE_FILE}, or raise code.max_mb"
        )

    def archive(self) -> tuple[bytes, str]:
        """A packed tar file of the files alone, the same for the same content, and the hash of what is in it.

        That may be another one than `hash`: files change while we read. Raises UsageError where one can't be read.
        """
        buffer, whole = io.BytesIO(), hashlib.sha256()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            for name in self.names:
                with _naming():
                    info = archive.gettarinfo(str(self.folder / name), arcname=name)
                    data = (self.folder / name).read_bytes() if info.isreg() else os.fsencode(info.linkname)
                kind = kind_of(info.mode) if info.isreg() else "link"
                info.size = len(data) if info.isreg() else 0
                info.mtime = info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mode = 0o755 if kind == "program" else 0o644
                archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
                whole.update(line_of(kind, name, hashlib.sha256(data).hexdigest()))
        return buffer.getvalue(), whole.hexdigest()


@contextmanager
def _naming() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename}, which would go along to the workers: {error.strerror}"
        ) from error


def project_of(loaded: LoadedConfig, path: Sequence[str]) -> Project | None:
    """The project that the workload belongs to; None where it is installed or built in, or the code is to stay here.

    `path` is where the workload is looked for. Raises UsageError where code.folder is no folder.
    """
    config = loaded.config
    if not config.code.ship:
        return None
    script = config.script
    if script is not None and script.script:
        found = [Path(folder) / script.script for folder in path if (Path(folder) / script.script).is_file()]
    else:
        target = script.module if script is not None else workload_target(str(config.workload)).partition(":")[0]
        source = find_source(str(target), path)
        found = [source.path] if source is not None else []
    if not found:
        return None
    file = found[0].resolve()
    folder = project_folder(Path(path[0]), config.code.folder)
    return Project(folder, file) if folder is not None and file.is_relative_to(folder) else None


def project_folder(beside: Path, chosen: str | None) -> Path | None:
    """The folder that goes along: the one chosen, else the git work tree around `beside`, else `beside` itself.

    None where that would be somebody's home, or everything. Raises UsageError where the one chosen is none.
    """
    if chosen is not None:
        folder = Path(chosen).expanduser().resolve()
        if not folder.is_dir():
            raise UsageError(f"code.folder is {chosen!r}, which is no folder")
        return folder
    root = _git(beside, "rev-parse", "--show-toplevel")
    folder = Path(root.strip()).resolve() if root and root.strip() else beside.resolve()
    return None if folder in (Path.home(), Path(folder.anchor)) else folder


def pack(folder: Path, besides: Sequence[Path]) -> Package:
    """What of the folder goes along: what git would know, less what is ignored or secret, or lies in `besides`."""
    return Package(folder, dict(_files(folder, besides)))


def _files(folder: Path, besides: Sequence[Path]) -> Iterator[tuple[str, int]]:
    ignored = pathspec.PathSpec.from_lines("gitignore", [*_LEFT_OUT, *_own_rules(folder)])
    apart = [path.resolve() for path in besides]
    for name in _listed(folder):
        path = folder / name
        if ignored.match_file(name) or any(path.is_relative_to(other) for other in apart):
            continue
        try:
            status = os.lstat(path)
        except OSError:
            continue  # deleted, and git has not been told
        inside = stat.S_ISLNK(status.st_mode) and path.resolve().is_relative_to(folder.resolve())
        if stat.S_ISREG(status.st_mode) or inside:
            yield name, status.st_size


def _own_rules(folder: Path) -> list[str]:
    try:
        return (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {folder / IGNORE_FILE}: {error}") from error


def _listed(folder: Path) -> Iterator[str]:
    """Every file, as git sees it where there is git: what is ignored there stays here."""
    told = _git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if told is not None:
        yield from (name for name in told.split("\0") if name)
        return
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "node_modules")
        ]
        yield from (str((Path(root) / name).relative_to(folder)) for name in names)


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where there is no git, or no work tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
