"""The tags and the note of a run. They are in a file of their own, because only the driver writes run.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ddptrain.config.wording import shorten
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import CREATE, open_regular, wait_for_lock
from ddptrain.results.errors import results_errors
from ddptrain.results.secure_files import read_bytes, require_own_folder, write_file

if TYPE_CHECKING:
    from ddptrain.storage.store import Store

FILE = "annotations.json"  # in the run directory
MOST_TAGS = 50
LONGEST_NOTE = 4_000  # characters
_TAG = re.compile(r"[^\W_][\w.:/-]{0,63}")


@dataclass(frozen=True, slots=True)
class Annotations:
    """Tags, in the order in which they were added, and a note, which may have several lines."""

    tags: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def parse(cls, data: bytes | None) -> Self:
        """Parse the file without its invalid entries: another user may have written it."""
        try:
            raw = json.loads(data or b"{}")
            tags, note = raw.get("tags"), raw.get("note")
        except (ValueError, AttributeError, RecursionError):
            return cls()
        valid = [tag for tag in tags if _is_tag(tag)] if isinstance(tags, list) else []
        return cls(tuple(dict.fromkeys(valid))[:MOST_TAGS], note[:LONGEST_NOTE] if isinstance(note, str) else "")

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"tags": self.tags, "note": self.note}, indent=2).encode() + b"\n"

    def with_tags(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> Self:
        """Return a copy with tags added and removed. Raises UsageError if there are then more than 50 tags."""
        tags = tuple(tag for tag in dict.fromkeys((*self.tags, *add)) if tag not in set(remove))
        if len(tags) > MOST_TAGS:
            raise UsageError(f"a run can have {MOST_TAGS} tags, not {len(tags)}; remove some, as -{tags[0]}")
        return replace(self, tags=tags)


def tag_changes(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the tags to add and to remove: `+good` or `good` adds, `-old` removes.

    Raises UsageError for an invalid tag, and for one that is added and removed.
    """
    add: list[str] = []
    remove: list[str] = []
    for word in words:
        tag = word[1:] if word[:1] in ("+", "-") else word
        if not _is_tag(tag):
            raise UsageError(
                f'"{shorten(word)}" is not a tag: use up to 64 letters, digits and . : / _ -, beginning with a letter '
                "or a digit, as +good to add one and -old to remove one"
            )
        (remove if word[0] == "-" else add).append(tag)
    if both := sorted({*add} & {*remove}):
        raise UsageError(f"tag {both[0]} is both added and removed; give it once")
    return add, remove


def checked_note(text: str) -> str:
    """Return the note without surrounding blanks. Raises UsageError if it is too long, or contains control characters.

    Line breaks and tabs are allowed.
    """
    note = text.strip()
    if len(note) > LONGEST_NOTE:
        raise UsageError(f"the note has {len(note):,} characters; at most {LONGEST_NOTE:,} are allowed")
    wrong = next((char for char in note if not (char.isprintable() or char in "\n\t")), "")
    if wrong:
        raise UsageError(f"the note contains the character U+{ord(wrong):04X}, which cannot be printed; leave it out")
    return note


def _is_tag(value: object) -> bool:
    return isinstance(value, str) and _TAG.fullmatch(value) is not None and value.isprintable()


Change = Callable[[Annotations], Annotations]
_LOCK = f".{FILE}.lock"
_MOST_CONFLICTS = 20


def edit_folder(folder: Path, change: Change) -> Annotations:
    """Change the annotations of the run in a local folder; return the new ones.

    Raises ResultsError.
    """
    require_own_folder(folder)
    with results_errors(folder / _LOCK):
        descriptor = open_regular(folder / _LOCK, CREATE, 0o600)
    try:
        with results_errors(folder / _LOCK, "lock"):
            wait_for_lock(descriptor)
        before = None
        with suppress(OSError):
            before = read_bytes(folder / FILE)
        changed = change(Annotations.parse(before))
        write_file(folder / FILE, changed.to_json())
        return changed
    finally:
        os.close(descriptor)


def edit_stored(run: Store, change: Change) -> Annotations:
    """Change the annotations of a run in a store; return the new ones.

    If several processes change them at once, no change is lost. Raises ClusterError, StoreError.
    """
    from ddptrain.storage.store import WriteConflict

    for _ in range(_MOST_CONFLICTS):
        try:
            before = run.read_versioned(FILE)
            changed = change(Annotations.parse(before.data if before is not None else None))
            run.write_versioned(FILE, changed.to_json(), before)
        except WriteConflict:
            continue
        return changed
    raise ClusterError(f"{run.url}/{FILE} was changed by other processes {_MOST_CONFLICTS} times in a row: try again")
