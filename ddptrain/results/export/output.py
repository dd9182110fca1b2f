"""Writes the files of an export. Each file is complete, or absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ddptrain.errors import UsageError
from ddptrain.file_ops import atomic_file


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends; missing folders are created. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, durable=False) as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another place with -o") from error


def encodable(text: str) -> str:
    """Return the text with escapes for lone surrogates, which UTF-8 cannot encode but JSON may contain."""
    return text.encode("utf-8", "backslashreplace").decode()
