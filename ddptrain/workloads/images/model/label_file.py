"""Reads the labels of a model from a file in any common form. Nothing in the file is executed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.config.wording import describe_value, shorten
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.workloads.images.model.labels import Label, Labels

MAX_BYTES = 4 << 20
MAX_LABELS = 100_000
_LONGEST_LABEL = 2000
_ID = re.compile(r"n[0-9]{8}")
_ID_FIRST = re.compile(r"(n[0-9]{8})[\s,:;]+(\S.*)")
_NUMBER_FIRST = re.compile(r"([0-9]{1,7})\s*[:,;\t]\s*(\S.*)")
_FORMS = "{0: 'tench, Tinca tinca', ...}, the same as JSON, or one label per line"


class _Wrong(Exception):
    """What is wrong with the text; the caller adds the name of the file."""


def read_labels(where: str, read: Callable[[str], bytes] | None = None, n_outputs: int | None = None) -> Labels:
    """Return the labels of a model with `n_outputs`, from a file, or from a URL that `read` downloads.

    Raises UsageError if it is unreadable, has no labels, or not one for each output.
    """
    source = hide_credentials(where)
    labels = parse_labels(_read(Path(where).expanduser()) if read is None else read(where), source)
    if n_outputs is not None and len(labels) != n_outputs:
        raise UsageError(
            f"the labels of {source} are {len(labels):,}, but the model has {n_outputs:,} outputs: "
            "they are not those of this model"
        )
    return labels


def parse_labels(data: bytes, source: str) -> Labels:
    """Return the labels in the bytes of a file: a dict as Python or JSON writes it, a list, or lines of text.

    Raises UsageError if there are none, or if they are ambiguous.
    """
    try:
        if len(data) > MAX_BYTES:
            raise _Wrong(f"it has more than {MAX_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
        labels = tuple(_label(output, entry) for output, entry in enumerate(_entries(text.strip())))
        _refuse_repeated_ids(labels)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"no labels in {source}: byte {error.start:,} is not UTF-8; it should contain {_FORMS}"
        ) from None
    except _Wrong as error:
        raise UsageError(f"no labels in {source}: {error}; it should contain {_FORMS}") from None
    return Labels(source, labels)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            raise UsageError(f"there is no labels file {path}" if not path.exists() else f"{path} is not a labels file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"can't read the labels of {path}: {error.strerror or error}") from error


def _entries(text: str) -> Sequence[Any]:
    """Return the entry of each output, in their order."""
    if not text:
        raise _Wrong("it is empty")
    found = _structure(text) if text[0] in "{[(" else _lines(text)
    entries = _in_order(found) if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise _Wrong("it holds neither a list nor a mapping of labels")
    if len(entries) > MAX_LABELS:
        raise _Wrong(f"it has {len(entries):,} labels, more than {MAX_LABELS:,}")
    return entries


def _structure(text: str) -> Any:
    """Parse JSON, or else a Python literal of lists, dicts, texts and whole numbers."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        pass
    try:
        return _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        raise _Wrong(f"{line}it is neither JSON nor a dict of Python") from None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() as value):
            return value
        case ast.List() | ast.Tuple():
            return [_literal(item) for item in node.elts]
        case ast.Dict():
            if None in node.keys:
                raise _Wrong(f"line {node.lineno}: it unpacks another dict")
            pairs = zip(node.keys, node.values, strict=True)
            return _once([(_literal(key), _literal(value)) for key, value in pairs if key is not None])
    raise _Wrong(f"line {node.lineno}: {shorten(ast.unparse(node), 40)!r} is neither text nor a number")


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if isinstance(key, list | dict):
            raise _Wrong(f"a key is {describe_value(key)}, not the number of an output")
        if key in values:
            raise _Wrong(f"{shorten(str(key))} is there twice")
        values[key] = value
    return values


def _in_order(found: Mapping[Any, Any]) -> list[Any]:
    """Return the values of a mapping from numbers of outputs, which may be texts."""
    by_output: dict[int, Any] = {}
    for key, value in found.items():
        if isinstance(key, bool) or not re.fullmatch(r"[0-9]{1,7}", str(key)):
            raise _Wrong(f"the key {shorten(str(key))!r} is not the number of an output")
        if int(key) in by_output:
            raise _Wrong(f"output {int(key)} is there twice")
        by_output[int(key)] = value
    for output in range(len(by_output)):
        if output not in by_output:
            raise _Wrong(f"output {output} has no label, and they are counted from 0 without a gap")
    return [by_output[output] for output in range(len(by_output))]


def _lines(text: str) -> Any:
    """Return one label per line; if each line begins with a number, that is its output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    numbered = [_NUMBER_FIRST.fullmatch(line) for line in lines]
    if all(numbered):
        return _once([(match[1], match[2].strip("'\"")) for match in numbered if match])
    return lines


def _label(output: int, entry: Any) -> Label:
    """Return a label from its text, from a pair of WordNet id and text, or from both in one text."""
    wordnet_id = None
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _ID.fullmatch(entry[0]):
        wordnet_id, entry = entry
    elif isinstance(entry, str) and (match := _ID_FIRST.fullmatch(entry)):
        wordnet_id, entry = match.groups()
        if re.match(r"[0-9]+\s", entry):
            raise _Wrong(f"output {output}: {shorten(match[0])!r} has a number of its own; which output is it for?")
    if not isinstance(entry, str) or not entry.strip():
        raise _Wrong(f"output {output} has {describe_value(entry)} for a label")
    if len(entry) > _LONGEST_LABEL or not entry.isprintable():
        raise _Wrong(f"output {output}: {shorten(entry)!r} is not a label")
    return Label(output, entry.strip(), wordnet_id)


def _refuse_repeated_ids(labels: Sequence[Label]) -> None:
    first: dict[str, int] = {}
    for label in labels:
        if label.wordnet_id is not None and first.setdefault(label.wordnet_id, label.output) != label.output:
            raise _Wrong(f"outputs {first[label.wordnet_id]} and {label.output} have the same id {label.wordnet_id}")
