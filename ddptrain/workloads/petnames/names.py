"""Reads, cleans and splits the list of names. The result is the same on every rank."""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import io
import json
import lzma
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile

from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import Limits, StoreError, fetch_chunks
from ddptrain.workloads.petnames.alphabet import foreign_characters, normalise
from ddptrain.workloads.petnames.params import PetnamesParams

_LIMITS = Limits(timeout_s=300.0, retries=2)
_DEADLINE_S = 600.0  # for the whole source; the limit of the store is for one request, and a large file takes many
MAX_SOURCE_BYTES = 256 * 2**20  # lists of names are small: a larger file is the wrong one
_FORMATS = {".json": "json", ".txt": "text", ".text": "text", ".csv": "csv"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zip"}
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CleanNames:
    """The usable names of a source, in its order, and what was left out."""

    names: tuple[str, ...]
    n_source: int
    n_empty: int
    n_repeated: int
    too_long: tuple[str, ...]
    foreign: tuple[str, ...]

    def report(self, source: str) -> str:
        """Return one line for the log: how many names are used, and why the others are not."""
        reasons = [
            _left_out(self.foreign, "with characters outside a-z, '-', '.' and space"),
            _left_out(self.too_long, "too long"),
            f"{self.n_empty:,} empty" if self.n_empty else "",
            f"{self.n_repeated:,} repeated" if self.n_repeated else "",
        ]
        text = "; ".join(reason for reason in reasons if reason) or "none"
        return f"names: {len(self.names):,} of {self.n_source:,} from {hide_credentials(source)}; left out: {text}"


@dataclass(frozen=True, slots=True)
class Split:
    """Names for training (with repeats unless `unique`), and distinct held-out names that are not among them."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def check(params: Mapping[str, object], folder: Path, tell: Callable[[str], None]) -> None:
    """Check before any rank starts that a rank on this host can read and split the names. Raises UsageError."""
    settings = PetnamesParams.model_validate_json(json.dumps(params), strict=True)
    split_names(load_names(settings).names, settings.val_fraction, settings.seed)


def load_names(settings: PetnamesParams) -> CleanNames:
    """Read and clean the names that the parameters select. A path is relative to the working directory.

    Raises UsageError if the source can't be read, has the wrong format, or contains no usable name.
    """
    source = settings.names
    if source == "builtin":
        file = importlib.resources.files(__package__).joinpath("names.txt")
        entries: Sequence[object] = file.read_text(encoding="utf-8").splitlines()
    else:
        kind = _format_of(source, settings.names_format)
        entries = _parse(_read(source, settings.names_options), kind, settings.names_column, source)
    clean = clean_names(entries, unique=settings.unique, max_length=settings.max_name_length)
    if not clean.names:
        raise UsageError(
            f"no usable name: {clean.report(source).removeprefix('names: ')}; give params.names a list of pet names"
        )
    return clean


def clean_names(entries: Sequence[object], *, unique: bool = True, max_length: int = 64) -> CleanNames:
    """Normalise entries; drop and count empty, too long, foreign, and (if `unique`) repeated ones."""
    kept: list[str] = []
    seen: set[str] = set()
    too_long: list[str] = []
    foreign: list[str] = []
    n_empty = n_repeated = 0
    for entry in entries:
        name = "" if entry is None else normalise(str(entry))
        if not name:
            n_empty += 1
        elif foreign_characters(name):
            foreign.append(name)
        elif len(name) > max_length:
            too_long.append(name)
        elif unique and name in seen:
            n_repeated += 1
        else:
            seen.add(name)
            kept.append(name)
    return CleanNames(tuple(kept), len(entries), n_empty, n_repeated, tuple(too_long), tuple(foreign))


def split_names(names: Sequence[str], val_fraction: float, seed: int) -> Split:
    """Hold out a share of the distinct names; all copies of them leave the training names.

    The choice depends on the seed and the set of names, not on their order.

    Raises:
        UsageError: no name would be left for training.
    """
    distinct = sorted(set(names))
    n_held_out = max(1, round(len(distinct) * val_fraction)) if val_fraction > 0 else 0
    if n_held_out >= len(distinct):
        raise UsageError(
            f"params.val_fraction {val_fraction} of {counted(len(distinct), 'distinct name')} leaves nothing to train "
            "on: give more names, or set val_fraction: 0"
        )
    held_out = set(random.Random(seed).sample(distinct, n_held_out))
    return Split(tuple(name for name in names if name not in held_out), tuple(sorted(held_out)))


def _left_out(names: Sequence[str], why: str) -> str:
    if not names:
        return ""
    examples = ", ".join(ascii(name[:40]) for name, _ in Counter(names).most_common(_EXAMPLES))
    return f"{len(names):,} {why} (such as {examples})"


def _format_of(source: str, names_format: str) -> str:
    """Return the requested format, or the one that belongs to the suffix. Raises UsageError for an unknown suffix."""
    if names_format != "auto":
        return names_format
    path = PurePosixPath(source.partition("?")[0] if "://" in source else source)
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    if suffixes and suffixes[-1] in _FORMATS:
        return _FORMATS[suffixes[-1]]
    raise UsageError(
        f"can't recognise the format of params.names {hide_credentials(source)!r} by its suffix: "
        "set params.names_format to json, text or csv"
    )


def _read(source: str, options: Mapping[str, Any]) -> str:
    """Return the text of a path or URL, decompressed according to its suffix. Raises UsageError."""
    try:
        content = _unpacked(_limited(fetch_chunks(source, options, setting="params.names", limits=_LIMITS)), source)
    except _TooSlow:
        raise UsageError(
            f"params.names {hide_credentials(source)!r} could not be read within {_DEADLINE_S:g} s: "
            "is the server too slow?"
        ) from None
    except (StoreError, UsageError, OSError, ValueError, EOFError, zlib.error, lzma.LZMAError, BadZipFile) as error:
        raise UsageError(
            f"can't read params.names {hide_credentials(source)!r}: {hide_credentials(str(error))}; "
            "a path is relative to the working directory, options of a URL go into params.names_options"
        ) from None
    if len(content) > MAX_SOURCE_BYTES:
        raise UsageError(f"params.names {hide_credentials(source)!r} holds more than {MAX_SOURCE_BYTES // 2**20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"params.names {hide_credentials(source)!r} is not UTF-8 text (byte {error.start}): convert it to UTF-8"
        ) from None


def _limited(chunks: Iterable[bytes]) -> bytes:
    """Return the content, but at most one chunk more than the limit. Raises _TooSlow."""
    deadline = time.monotonic() + _DEADLINE_S
    parts, size = [], 0
    for part in chunks:
        parts.append(part)
        size += len(part)
        if size > MAX_SOURCE_BYTES:
            break
        if time.monotonic() > deadline:
            raise _TooSlow
    return b"".join(parts)


def _unpacked(content: bytes, source: str) -> bytes:
    """Return the content, decompressed according to the suffix of the source; at most one byte more than the limit."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    name = infer_compression(source.partition("?")[0])
    if name is None or len(content) > MAX_SOURCE_BYTES:
        return content
    with compr[name](io.BytesIO(content), mode="rb") as file:
        unpacked: bytes = file.read(MAX_SOURCE_BYTES + 1)
    return unpacked


class _TooSlow(Exception):
    """The deadline passed before the end of the file."""


def _parse(text: str, kind: str, column: str | None, source: str) -> Sequence[object]:
    try:
        if kind == "json":
            return _parse_json(text, column)
        return _parse_csv(text, column) if kind == "csv" else text.splitlines()
    except (json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise UsageError(
            f"params.names {hide_credentials(source)!r} is not valid {kind}: {error}; see params.names_format"
        ) from None
    except UsageError as error:
        raise UsageError(f"params.names {hide_credentials(source)!r}: {error}") from None


def _parse_json(text: str, column: str | None) -> Sequence[object]:
    document = json.loads(text)
    if not isinstance(document, list):
        raise UsageError(f"expected a JSON list of names, found a {type(document).__name__}")
    return [_json_entry(entry, position, column) for position, entry in enumerate(document)]


def _json_entry(entry: object, position: int, column: str | None) -> object:
    if isinstance(entry, dict):
        if column is None:
            raise UsageError(
                f"entry {position} is an object with {_listed(list(entry))}: select one with params.names_column"
            )
        if column not in entry:
            raise _missing(f"entry {position}", column, list(entry))
        return entry[column]
    if isinstance(entry, list):
        raise UsageError(f"entry {position} is a list; expected a list of names")
    return entry


def _parse_csv(text: str, column: str | None) -> Sequence[object]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = list(reader.fieldnames or [])
    if not columns:
        raise UsageError("the CSV file is empty; expected a line of column names, then one name per line")
    if column is None:
        raise UsageError(f"the CSV file has {_listed(columns)}: select one with params.names_column")
    if column not in columns:
        raise _missing("the CSV file", column, columns)
    return [row[column] for row in reader]


def _missing(where: str, column: str, columns: Sequence[str]) -> UsageError:
    nearest = difflib.get_close_matches(column, columns, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "; set params.names_column to one of them"
    return UsageError(f"{where} has no {column!r} but {_listed(columns)}{hint}")


def _listed(columns: Sequence[str]) -> str:
    return "the columns " + ", ".join(repr(name) for name in columns[:12]) if columns else "no columns"
