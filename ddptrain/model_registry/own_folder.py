"""A folder of this user as a store of the registry: no link is followed, and a write can demand that a file is new."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddptrain import file_ops
from ddptrain.results.errors import ResultsError
from ddptrain.results.secure_files import require_own_folder
from ddptrain.storage import store

_CHUNK_BYTES = 1 << 20


class OwnFolder(store.Store):
    """A folder below which only this user writes. Others may read it, if its mode allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(store.Location(str(folder), setting="--models-dir"))
        self._root = folder

    def listing(self, folder: str = "") -> Iterator[store.Listed]:
        """See Store."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise self._error("listed", folder, error) from error

        for path, folders, names in os.walk(self._root / folder, onerror=refuse):  # does not follow links
            folders.sort()
            for name in sorted(names):
                file = Path(path, name)
                if file.suffix == ".tmp" or file.is_symlink():
                    continue
                with suppress(FileNotFoundError):  # deleted since it was listed
                    state = file.lstat()
                    yield store.Listed(file.relative_to(self._root).as_posix(), state.st_size, f"{state.st_mtime_ns:x}")

    def folders(self, folder: str = "") -> list[str]:
        """See Store."""
        try:
            with os.scandir(self._root / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._error("listed", folder, error) from error

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Store."""
        try:
            with os.fdopen(file_ops.open_regular(self._root / key), "rb") as file:
                file.seek(start)
                return self._limited(key, file.read(-1 if limit_bytes is None else limit_bytes + 1), limit_bytes)
        except OSError as error:
            raise self._error("read", key, error) from error

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Store."""
        try:
            with os.fdopen(file_ops.open_regular(self._root / key), "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._error("read", key, error) from error

    def put(self, key: str, data: bytes | Path) -> None:
        """See Store."""
        try:
            self.make_parent(key)
            with file_ops.atomic_file(self._root / key) as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    with os.fdopen(file_ops.open_regular(data), "rb") as source:
                        shutil.copyfileobj(source, file, _CHUNK_BYTES)
        except OSError as error:
            raise self._error("written", key, error) from error

    def delete(self, key: str) -> None:
        """See Store. Folders that become empty are deleted as well."""
        path = self._root / key
        try:
            require_own_folder(path.parent)
            path.unlink()
        except (OSError, ResultsError) as error:
            raise self._error("deleted", key, error) from error
        for parent in path.relative_to(self._root).parents[:-1]:
            with suppress(OSError):  # it is not empty
                (self._root / parent).rmdir()

    def delete_temporary_files(self, folder: str) -> None:
        """Delete what killed writers have left below a folder: files that listing() leaves out."""
        for path in (self._root / folder).rglob("*.tmp"):
            with suppress(OSError):
                path.unlink()

    def get_versioned(self, key: str) -> store.Versioned | None:
        """See Store; the version is left out, because a file is not replaced."""
        try:
            with os.fdopen(file_ops.open_regular(self._root / key), "rb") as file:
                return store.Versioned(file.read(), written_s=os.fstat(file.fileno()).st_mtime)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error("read", key, error) from error

    def put_versioned(self, key: str, data: bytes, before: store.Versioned | None) -> store.Versioned:
        """See Store: the file must be new. It gets its name with link(2), which fails if the name exists."""
        if before is not None:
            raise store.NoConditionalWrites("a file of a folder is only created on a condition, not replaced")
        path = self._root / key
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self.make_parent(key)
            file_ops.write_atomic(beside, data)
            try:
                os.link(beside, path)
            finally:
                beside.unlink(missing_ok=True)
            file_ops.sync_folder(path.parent)
        except FileExistsError:
            raise store.WriteConflict(f"{path} was written by another process") from None
        except OSError as error:
            raise self._error("written", key, error) from error
        return store.Versioned(data)

    def make_parent(self, key: str) -> None:
        """Create the folders of a key; each must be this user's. The root's own parents are created as well.

        Raises StoreError for a folder of another user; OSError.
        """
        try:
            self._root.mkdir(mode=0o755, parents=True, exist_ok=True)
            folder = self._root
            require_own_folder(folder)
            for part in Path(key).parts[:-1]:
                folder /= part
                folder.mkdir(mode=0o755, exist_ok=True)
                require_own_folder(folder)
        except ResultsError as error:
            raise store.StoreError(str(error).replace("--runs-dir", "--models-dir")) from error

    def _error(self, action: str, key: str, error: Exception) -> store.StoreError:
        if isinstance(error, FileNotFoundError):
            return store.NotFound(key)
        kind = store.Transient if isinstance(error, TimeoutError) else store.StoreError
        return kind(f"{self._root / key} can't be {action}: {getattr(error, 'strerror', None) or error}")
