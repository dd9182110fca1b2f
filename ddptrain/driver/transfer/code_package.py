"""What of a project goes along to workers that don't see its folder, and in which form."""

from __future__ import annotations

import gzip
import hashlib
import heapq
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
from typing import Any

import pathspec

from ddptrain.config.load import LoadedConfig
from ddptrain.config.params import find_source
from ddptrain.config.registry import workload_target
from ddptrain.errors import UsageError
from ddptrain.protocol.code_digest import content_hash, kind_of, line_of, link_target
from ddptrain.secret_rules import is_secret_file

IGNORE_FILE = ".ddptrainignore"
# Never code; in gitignore's own syntax. Files that hold secrets stay here as well: see secret_rules.py.
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
""".splitlines()
_GIT_TIMEOUT_S = 30.0
_MB = 1_000_000
_NAMED = 5  # of the largest files
_SAMPLE = 1_000  # files that tell a folder from another one


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
    def sample(self) -> list[str]:
        """The files that were changed last, by which a folder is known: all of them would take long where data lie."""

        def changed(name: str) -> int:
            try:
                return os.lstat(self.folder / name).st_mtime_ns
            except OSError:
                return 0

        return self.names if len(self.names) <= _SAMPLE else heapq.nlargest(_SAMPLE, self.names, key=changed)

    @cached_property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(self.sizes.values())

    @cached_property
    def hash(self) -> str:
        """Of all that the files are. Raises UsageError where one can't be read."""
        with _naming():
            return content_hash(self.folder, self.names)

    def check(self, needed: Path, max_mb: float) -> None:
        """Raise UsageError where the file `needed` is left out, or, with the largest files, over `max_mb`."""
        if str(needed.relative_to(self.folder)) not in self.sizes:
            raise UsageError(
                f"{needed} would not go along to workers that don't see {self.folder}: it is ignored by git, or by "
                f"{IGNORE_FILE}. Take it out there, or choose another code.folder"
            )
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
        with (
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=buffer, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name in self.names:
                whole.update(self._add(archive, name))
        return buffer.getvalue(), whole.hexdigest()

    def _add(self, archive: tarfile.TarFile, name: str) -> bytes:
        """Add a file as it is now; return its line in the hash."""
        path = self.folder / name
        with _naming():
            info = archive.gettarinfo(str(path), arcname=name)
            is_link = info.issym()
            data = os.fsencode(link_target(path)) if is_link else path.read_bytes()
        kind = "link" if is_link else kind_of(info.mode)
        info.type = tarfile.SYMTYPE if is_link else tarfile.REGTYPE
        info.linkname = os.fsdecode(data) if is_link else ""
        info.size = 0 if is_link else len(data)
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if kind == "program" else 0o644
        archive.addfile(info, None if is_link else io.BytesIO(data))
        return line_of(kind, name, hashlib.sha256(data).hexdigest())


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
    rules = pathspec.PathSpec.from_lines("gitignore", [*_LEFT_OUT, *_own_rules(folder)])
    apart = tuple(f"{name}/" for name in _names_apart(folder, besides))
    for name in _listed(folder):
        if name.startswith(apart) or _is_ignored(name, rules) or not _can_travel(name):
            continue
        path = f"{folder}/{name}"
        try:
            status = os.lstat(path)
        except OSError:
            continue  # deleted, and git has not been told
        if stat.S_ISREG(status.st_mode) or (stat.S_ISLNK(status.st_mode) and _stays_inside(folder, name)):
            yield name, status.st_size


def _is_ignored(name: str, rules: pathspec.PathSpec[Any]) -> bool:
    """Whether a file stays here; a rule of the user's, as `!public.pem`, takes a file along that looks secret."""
    ignored = rules.check_file(name).include
    return is_secret_file(name) if ignored is None else ignored


def _names_apart(folder: Path, besides: Sequence[Path]) -> Iterator[str]:
    """Folders below the project that are none of it; of results in the project's own folder, each run's."""
    real = folder.resolve()
    for other in (path.resolve() for path in besides):
        found = [run.parent for run in other.glob("*/run.json")] if real.is_relative_to(other) else [other]
        yield from (str(path.relative_to(real)) for path in found if path != real and path.is_relative_to(real))


def _can_travel(name: str) -> bool:
    """Whether it is a name in messages, too: one that is no UTF-8 is not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stays_inside(folder: Path, name: str) -> bool:
    """Whether a link leads to a place in the folder, as it is spelled and as it is."""
    path = folder / name
    spelled = Path(os.path.normpath(path.parent / link_target(path)))
    return spelled.is_relative_to(folder) and path.resolve().is_relative_to(folder.resolve())


def _own_rules(folder: Path) -> list[str]:
    try:
        return (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {folder / IGNORE_FILE}: {error}") from error


def _listed(folder: Path, within: str = "") -> Iterator[str]:
    """Every file, as git sees it where there is git: what is ignored there stays here."""
    told = _git(folder / within, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if told is None:
        yield from _walked(folder, within)
        return
    for name in filter(None, told.split("\0")):
        path = f"{folder}/{within}{name}"
        if os.path.isdir(path) and not os.path.islink(path):  # a submodule, or a work tree of its own
            if os.path.exists(f"{path}/.git"):
                yield from _listed(folder, f"{within}{name.rstrip('/')}/")
        else:
            yield within + name


def _walked(folder: Path, within: str) -> Iterator[str]:
    start = len(str(folder)) + 1
    for root, folders, names in os.walk(folder / within):
        links = [name for name in folders if os.path.islink(f"{root}/{name}")]
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "node_modules")
        ]
        yield from (f"{root}/{name}"[start:] for name in (*names, *links))


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where there is no git, or no work tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
