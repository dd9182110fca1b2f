"""Files that trackers may read for a while: names of their own, for the driver takes the ranks' files away."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Loan:
    """Files or folders that are deleted when all who have borrowed them have given them back."""

    def __init__(self, paths: Sequence[Path], borrowers: int) -> None:
        self._paths = paths
        self._left = borrowers
        self._lock = threading.Lock()

    def back(self) -> None:
        """One borrower is done. Never raises."""
        with self._lock:
            self._left -= 1
            if self._left > 0:
                return
        for path in self._paths:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class Lending:
    """The folder that what is lent lies in; it goes when the rank's trackers have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counter = itertools.count()

    def file(self, path: Path, suffix: str = "") -> Path:
        """Another name for a file, or a copy of it where the file system has none; `suffix` ends it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lent = self._folder / f"{next(self._counter)}{suffix or path.suffix}"
        link(path, lent)
        return lent

    def tree(self, folder: Path) -> Path:
        """Likewise for the files of a folder. Raises OSError."""
        lent = self._folder / f"{next(self._counter)}"
        lent.mkdir(parents=True)
        for path in folder.iterdir():
            link(path, lent / path.name)
        return lent

    def close(self) -> None:
        """Take everything back."""
        shutil.rmtree(self._folder, ignore_errors=True)


def link(path: Path, lent: Path) -> None:
    """Give a file another name, or make a copy of it. Raises OSError."""
    try:
        os.link(path, lent)
    except OSError:
        shutil.copyfile(path, lent)
