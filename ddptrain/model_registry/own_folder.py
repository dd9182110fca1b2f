"""A folder of this user as a store of the registry: no link is followed, and a write can demand that a file is new."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ddptrain import file_ops
from ddptrain.results.errors import ResultsError
from ddptrain.results.secure_files import require_own_folder
from ddptrain.storage.store import (
    Listed,
    LocalFolder,
    Location,
    NoConditionalWrites,
    NotFound,
    Store,
    StoreError,
    Transient,
    Versioned,
    WriteConflict,
)

_CHUNK_BYTES = 1 << 20


class OwnFolder(LocalFolder, Store):
    """A folder below which only this user writes. Others may read it, if its mode allows it."""

    def __init__(self, root: Path, path: str = "") -> None:
        super().__init__(Location(str(root), setting="--models-dir"))
        self.folder = root / path
        self._root, self._path = root, path

    @property
    def url(self) -> str:
        """See Store."""
        return str(self.folder)

    def below(self, name: str) -> OwnFolder:
        """See Store."""
        return OwnFolder(self._root, f"{self._path}/{name}" if self._path else name)

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Store."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise self._error("listed", folder, error) from error

        for path, folders, names in os.walk(self.folder / folder, onerror=refuse):  # does not follow links
            folders.sort()
            for name in sorted(names):
                file = Path(path, name)
                if file.suffix == ".tmp" or file.is_symlink():
                    continue
                with suppress(FileNotFoundError):  # deleted since it was listed
                    state = file.lstat()
                    yield Listed(file.relative_to(self.folder).as_posix(), state.st_size, f"{state.st_mtime_ns:x}")

    def folders(self) -> list[str]:
        """See Store."""
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._error("listed", "", error) from error

    def _open(self, key: str) -> BinaryIO:
        return os.fdopen(file_ops.open_regular(self.folder / key), "rb")

    def _read_error(self, key: str, error: OSError) -> StoreError:
        return self._error("read", key, error)

    def write(self, path: str, data: bytes | Path) -> None:
        """See Store."""
        self.make_parent(path)
        try:
            with file_ops.atomic_file(self.folder / path) as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    with os.fdopen(file_ops.open_regular(data), "rb") as source:
                        shutil.copyfileobj(source, file, _CHUNK_BYTES)
        except OSError as error:
            raise self._error("written", path, error) from error

    def remove(self, path: str) -> None:
        """See Store. Folders that become empty are deleted as well."""
        file = self.folder / path
        try:
            require_own_folder(self._root)
            file.unlink()
        except FileNotFoundError:
            return
        except (OSError, ResultsError) as error:
            raise self._error("deleted", path, error) from error
        for parent in file.relative_to(self._root).parents[:-1]:
            with suppress(OSError):  # it is not empty
                (self._root / parent).rmdir()

    def delete_temporary_files(self) -> None:
        """Delete what killed writers have left in it: files that listing() leaves out."""
        for path in self.folder.rglob("*.tmp"):
            with suppress(OSError):
                path.unlink()

    def read_versioned(self, path: str) -> Versioned | None:
        """See Store; the version is left out, because a file is not replaced."""
        try:
            with self._open(path) as file:
                return Versioned(file.read(), written_s=os.fstat(file.fileno()).st_mtime)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error("read", path, error) from error

    def write_versioned(self, path: str, data: bytes, before: Versioned | None) -> Versioned:
        """See Store: the file must be new. It gets its name with link(2), which fails if the name exists."""
        if before is not None:
            raise NoConditionalWrites("a file of a folder is only created on a condition, not replaced")
        self.make_parent(path)
        file = self.folder / path
        beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            file_ops.write_atomic(beside, data)
            try:
                os.link(beside, file)
            finally:
                beside.unlink(missing_ok=True)
            file_ops.sync_folder(file.parent)
        except FileExistsError:
            raise WriteConflict(f"{file} was written by another process") from None
        except OSError as error:
            raise self._error("written", path, error) from error
        return Versioned(data)

    def make_parent(self, path: str) -> None:
        """Create the folders of a file, if the root is this user's. Raises StoreError."""
        try:
            self._root.mkdir(mode=0o755, parents=True, exist_ok=True)
            require_own_folder(self._root)
            (self.folder / path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        except ResultsError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise self._error("written", path, error) from error

    def _error(self, action: str, path: str, error: Exception) -> StoreError:
        if isinstance(error, FileNotFoundError):
            return NotFound(path)
        kind = Transient if isinstance(error, TimeoutError) else StoreError
        return kind(f"{self.folder / path} can't be {action}: {getattr(error, 'strerror', None) or error}")
