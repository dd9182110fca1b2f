"""The code of a project for workers that do not see its folder: which files, their archive, and one copy for each host.

All attempts of a run use the code that was packed for the first one.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pathspec

from ddptrain.config.plugin_names import workload_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.workload_check import find_source
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import is_utf8, temp_folder
from ddptrain.protocol.code_digest import content_hash, inode_digest, link_target, move_path
from ddptrain.protocol.rank_spec import Code
from ddptrain.redact import is_secret_file
from ddptrain.worker import driver_calls

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.workers import Workers

IGNORE_FILE = ".ddptrainignore"
# Never code, in gitignore's syntax. Files that may hold secrets are left out as well: see redact.py.
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
_NAMED_FILES = 5  # the largest files that an error message names
_ARCHIVE, _HASH = "code.tar.gz", "hash"  # the files of a copy of the code
MAX_MB = 200.0  # that are sent to workers which do not see the project


@dataclass(frozen=True, slots=True)
class Project:
    """The folder of the user's code, and the file of the workload in it."""

    folder: Path
    file: Path


@dataclass(frozen=True)
class CodePackage:
    """The files to upload: size in bytes, by path below the project folder."""

    folder: Path
    sizes: Mapping[str, int]

    @cached_property
    def names(self) -> list[str]:
        """The paths below the folder, sorted."""
        return sorted(self.sizes)

    @cached_property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self.sizes.values())

    def check(self, needed: Path, max_mb: float) -> None:
        """Raise UsageError if the file `needed` is left out, or if all files have more than `max_mb` megabytes."""
        if str(needed.relative_to(self.folder)) not in self.sizes:
            raise UsageError(
                f"{needed} would not be uploaded to workers that don't see {self.folder}: git or {IGNORE_FILE} "
                "ignores it. Remove the pattern there, or choose another code.folder"
            )
        if self.size_bytes <= max_mb * _MB:
            return
        largest = sorted(self.sizes, key=lambda name: -self.sizes[name])[:_NAMED_FILES]
        named = ", ".join(f"{name} ({self.sizes[name] / _MB:.1f} MB)" for name in largest)
        raise UsageError(
            f"the project folder {self.folder} would be uploaded to workers that don't see it, and has "
            f"{self.size_bytes / _MB:.1f} MB, over {max_mb:g} MB; the largest files: {named}. List "
            f"what is not needed in {self.folder / IGNORE_FILE}, or set code.ship: false if all hosts have it"
        )

    @cached_property
    def archive(self) -> tuple[bytes, str]:
        """A tar.gz file, equal for equal content on any machine, and the hash of names, contents and modes.

        It is made once: all hosts get the same files. Raises UsageError if a file cannot be read.
        """

        def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
            """Leave out what differs between machines."""
            info.mode = 0o755 if info.isreg() and info.mode & stat.S_IXUSR else 0o644
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if info.issym():
                info.linkname = link_target(self.folder / info.name)
            return info

        buffer = io.BytesIO()
        try:
            with (
                gzip.GzipFile("", "wb", compresslevel=1, fileobj=buffer, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w") as archive,
            ):
                for name in self.names:
                    archive.add(self.folder / name, name, recursive=False, filter=plain)
            return buffer.getvalue(), content_hash(self.folder, self.names)
        except OSError as error:
            text = f"cannot read {error.filename}, which would be uploaded to the workers: {error.strerror}"
            raise UsageError(text) from error


def project_of(resolved: ResolvedConfig) -> Project | None:
    """Return the project of the workload; None if it is installed or built in, or if code.ship is false.

    Raises UsageError if code.folder is not a folder.
    """
    config, path = resolved.config, resolved.import_folders
    if not config.code.ship:
        return None
    script = config.script
    if script is not None and script.script:
        files = [Path(folder) / script.script for folder in path if (Path(folder) / script.script).is_file()]
    else:
        target = script.module if script is not None else workload_target(str(config.workload)).partition(":")[0]
        source = find_source(str(target), path)
        files = [source] if source is not None else []
    if not files:
        return None
    file = files[0].resolve()
    folder = project_folder(Path(path[0]), config.code.folder)
    return Project(folder, file) if folder is not None and file.is_relative_to(folder) else None


def project_folder(beside: Path, chosen: str | None) -> Path | None:
    """Return the folder to upload: the `chosen` one, else the git work tree that contains `beside`, else `beside`.

    None if that is the home directory or the root directory. Raises UsageError if `chosen` is not a folder.
    """
    if chosen is not None:
        folder = Path(chosen).expanduser().resolve()
        if not folder.is_dir():
            raise UsageError(f"code.folder is {chosen!r}, which is not a folder")
        return folder
    root = _git(beside, "rev-parse", "--show-toplevel")
    folder = Path(root.strip()).resolve() if root and root.strip() else beside.resolve()
    return None if folder in (Path.home(), Path(folder.anchor)) else folder


def pack(folder: Path, besides: Sequence[Path]) -> CodePackage:
    """Select the files of a project: what git tracks or would track, without ignored and secret files.

    `besides` are folders, such as that of results, that are left out. Raises UsageError.
    """
    ignored = folder / IGNORE_FILE
    try:
        own_rules = ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {ignored}: {error}") from error
    rules = pathspec.PathSpec.from_lines("gitignore", [*_LEFT_OUT, *own_rules])
    excluded = tuple(f"{name}/" for name in _excluded_folders(folder, besides))
    sizes = {}
    for name in _list_files(folder):
        is_ignored = rules.check_file(name).include
        # A rule of the user, such as `!public.pem`, includes a possibly secret file.
        if (
            is_ignored
            or (is_ignored is None and is_secret_file(name))
            or name.startswith(excluded)
            or not is_utf8(name)
        ):
            continue
        with suppress(OSError):  # git still lists a file that was deleted
            status = os.lstat(f"{folder}/{name}")
            if stat.S_ISREG(status.st_mode) or (stat.S_ISLNK(status.st_mode) and _stays_inside(folder, name)):
                sizes[name] = status.st_size
    return CodePackage(folder, sizes)


def _excluded_folders(folder: Path, besides: Sequence[Path]) -> Iterator[str]:
    """Yield the paths of excluded folders, relative to the project folder.

    If the project is itself inside an excluded folder, only the runs in that folder are excluded.
    """
    real = folder.resolve()
    for other in (path.resolve() for path in besides):
        folders = [run.parent for run in other.glob("*/run.json")] if real.is_relative_to(other) else [other]
        yield from (str(path.relative_to(real)) for path in folders if path != real and path.is_relative_to(real))


def _stays_inside(folder: Path, name: str) -> bool:
    """Return whether a symbolic link leads to a place in the folder, both as it is written and when it is resolved."""
    path = folder / name
    written = Path(os.path.normpath(path.parent / link_target(path)))
    # Path.resolve raises RuntimeError for a loop in Python 3.11 and 3.12.
    return written.is_relative_to(folder) and path.exists() and path.resolve().is_relative_to(folder.resolve())


def _list_files(folder: Path, within: str = "") -> Iterator[str]:
    """Yield all files, except those that git ignores, if git is available."""
    listed = _git(folder / within, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is None:
        yield from _walk(folder, within)
        return
    for name in filter(None, listed.split("\0")):
        path = f"{folder}/{within}{name}"
        if os.path.isdir(path) and not os.path.islink(path):  # a submodule, or another work tree
            if os.path.exists(f"{path}/.git"):
                yield from _list_files(folder, f"{within}{name.rstrip('/')}/")
        else:
            yield within + name


def _walk(folder: Path, within: str) -> Iterator[str]:
    start = len(str(folder)) + 1
    for root, folders, names in os.walk(folder / within):
        links = [name for name in folders if os.path.islink(f"{root}/{name}")]
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "node_modules")
        ]
        yield from (f"{root}/{name}"[start:] for name in (*names, *links))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if git is missing, or if the folder is not in a work tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


# --- the copies ---


def upload_code(
    workers: Workers,
    places: Sequence[RankPlace],
    package: CodePackage,
    needed: Path,
    max_mb: float,
    tell: Callable[[str], None],
) -> list[str]:
    """Return, for each place, the folder of the project's copy on its host; "" if its worker sees the project itself.

    A worker sees the project if the file `needed` is the same inode there. Raises ClusterError if the upload fails;
    UsageError if the code exceeds `max_mb`, or lacks that file.
    """
    host_of = {place.slot.worker: place.hostname for place in places}
    folders = dict.fromkeys(host_of, "")
    names = [str(needed.relative_to(package.folder))]
    try:
        digest = inode_digest(package.folder, names)
        seen = workers.ask([*host_of], driver_calls.sees_code, str(package.folder), names, digest)
        if lacking := {worker: host for worker, host in host_of.items() if not seen[worker]}:
            package.check(needed, max_mb)
            archive, code = package.archive
            hosts = ", ".join(dict.fromkeys(lacking.values()))
            tell(f"uploading {len(package.names)} files of {package.folder} to host {hosts}")
            with temp_folder("ddptrain-code-") as folder:
                (folder / "code").mkdir()
                (folder / "code" / _ARCHIVE).write_bytes(archive)
                (folder / "code" / _HASH).write_text(code)
                copies = workers.copy(lacking, folder / "code", (_ARCHIVE, _HASH), _HASH)
            for copy in set(copies.values()):
                having = [worker for worker in copies if copies[worker] == copy]
                folders |= workers.ask(having, driver_calls.unpack_code, f"{copy}/{_ARCHIVE}", code)
    except (ClusterError, OSError) as error:
        raise ClusterError(f"could not upload the code: {error}") from error
    return [folders[place.slot.worker] for place in places]


def move_code(code: Code, project: Path, root: str, content_hash: str) -> Code:
    """Return `code` with all paths below `project` replaced by those in the copy `root`."""
    return dataclasses.replace(
        code,
        content_hash=content_hash,
        workdir=move_path(code.workdir, project, root),
        script=move_path(code.script, project, root) if os.path.isabs(code.script) else code.script,
        sys_path=tuple(move_path(entry, project, root) for entry in code.sys_path),
    )
