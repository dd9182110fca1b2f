"""Pet names: the alphabet, and the list, which is read, cleaned and split equally on every rank. Without torch."""

from __future__ import annotations

import importlib.resources
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular, write_atomic
from ddptrain.redact import hide_credentials
from ddptrain.storage.sources import fetch
from ddptrain.storage.store import StoreError
from ddptrain.workloads.held_out import HeldOut, digest_of
from ddptrain.workloads.petnames.params import PetnamesParams

NAMES_FILE = "names.json"  # in artifacts/ of a run, and in the inputs of an evaluation
MAX_SOURCE_BYTES = 256 * 2**20  # lists of names are small: a larger file is the wrong one

BLANK = "*"  # before the first character, and as padding; never a target
STOP = "+"  # after the last character
SYMBOLS = BLANK + STOP + string.ascii_lowercase + "-. "
BLANK_ID = SYMBOLS.index(BLANK)
STOP_ID = SYMBOLS.index(STOP)

_IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_NAME_CHARACTERS = frozenset(SYMBOLS) - {BLANK, STOP}


def normalise(text: str) -> str:
    """Return the form in which names are compared and trained on: lower case, single spaces, no spaces at the ends."""
    return " ".join(text.lower().split())


def foreign_characters(text: str) -> str:
    """Return the characters of `text` that are not in the alphabet, each once, in order of appearance."""
    return "".join(dict.fromkeys(c for c in text if c not in _NAME_CHARACTERS))


def encode(text: str) -> list[int]:
    """Return the numbers (0 to 30) of the symbols of `text`. Raises KeyError if a symbol is not in the alphabet."""
    return [_IDS[symbol] for symbol in text]


def decode(numbers: Sequence[int]) -> str:
    """Return the inverse of `encode`."""
    return "".join(SYMBOLS[number] for number in numbers)


def display(name: str) -> str:
    """Return the name with capital letters, as users see it: "mr. whiskers" becomes "Mr. Whiskers"."""
    return name.title()


@dataclass(frozen=True, slots=True)
class CleanNames:
    """The usable names of a source, in its order, and what was left out: by the reason, the entries."""

    names: tuple[str, ...]
    left_out: Mapping[str, Sequence[str]]

    def report(self, source: str) -> str:
        """Return one line for the log: how many names are used, and why the others are not."""
        n_source = len(self.names) + sum(map(len, self.left_out.values()))
        text = "; ".join(_left_out(why, names) for why, names in self.left_out.items()) or "none"
        return f"names: {len(self.names):,} of {n_source:,} from {hide_credentials(source)}; left out: {text}"


def _left_out(why: str, names: Sequence[str]) -> str:
    shown = [ascii(name[:40]) for name, _ in Counter(names).most_common(3)]
    examples = f" (such as {', '.join(shown)})" if why not in ("empty", "repeated") else ""
    return f"{len(names):,} {why}{examples}"


@dataclass(frozen=True, slots=True)
class Split:
    """Names for training, and held-out names that are not among them."""

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
        entries = _entries(settings)
    clean = clean_names(entries)
    if not clean.names:
        found = (
            clean.report(source).removeprefix("names: ") if clean.left_out else f"{hide_credentials(source)} is empty"
        )
        raise UsageError(f"no usable name: {found}; give params.names a list of pet names")
    return clean


def clean_names(entries: Iterable[object], *, max_length: int = 64) -> CleanNames:
    """Normalise entries; leave out foreign, too long, empty and repeated ones."""
    kept: dict[str, None] = {}
    foreign = "with characters outside a-z, '-', '.' and space"
    left_out: dict[str, list[str]] = {foreign: [], "too long": [], "empty": [], "repeated": []}
    for entry in entries:
        name = "" if entry is None else normalise(str(entry))
        if not name:
            left_out["empty"].append(name)
        elif foreign_characters(name):
            left_out[foreign].append(name)
        elif len(name) > max_length:
            left_out["too long"].append(name)
        elif name in kept:
            left_out["repeated"].append(name)
        else:
            kept[name] = None
    return CleanNames(tuple(kept), {why: names for why, names in left_out.items() if names})


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


def prepare(request: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write the names of the run `request["run"]`, or of the source `request["data"]`, into `folder`.

    Raises UsageError if there are none, or they cannot be read.
    """
    if request["data"]:
        params = PetnamesParams.model_validate_json(json.dumps(request["params"]), strict=True)
        entries: Sequence[object] = load_names(params.model_copy(update={"names": request["data"]})).names
    else:
        entries = _held_out_by(Path(request["run"]))
    names = sorted(clean_names(entries, max_length=1000).names)
    if not names:
        raise UsageError(
            f"{Path(request['run']).name} held out no names (params.val_fraction): name a list of names with --data, "
            "or train with params.val_fraction above 0"
        )
    write_atomic(folder / NAMES_FILE, json.dumps(names).encode())
    HeldOut(digest_of({"names": names}), len(names), "names").write(folder)
    tell(f"{len(names):,} names to evaluate on")


def _held_out_by(run_dir: Path) -> Sequence[object]:
    path = run_dir / "artifacts" / NAMES_FILE
    try:
        entries = json.loads(read_regular(path))["held_out"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"can't read the names that {run_dir.name} held out: {path}: {type(error).__name__}: {error}; "
            "name others with --data"
        ) from error
    return entries if isinstance(entries, list) else []


def read_names(folder: Path) -> list[str]:
    """Return the names that `prepare` has written."""
    return [str(name) for name in json.loads((folder / NAMES_FILE).read_bytes())]


def _entries(settings: PetnamesParams) -> Sequence[object]:
    """Return the lines of a text file, or the values of a JSON list. Raises UsageError."""
    what = f"params.names {hide_credentials(settings.names)!r}"
    suffix = PurePosixPath(settings.names).suffix.lower()
    if suffix not in (".txt", ".json"):
        raise UsageError(f"{what} ends in neither .txt (a name on each line) nor .json (a list of names): convert it")
    try:
        content = fetch(settings.names, settings.names_options, "params.names", MAX_SOURCE_BYTES)
    except (StoreError, UsageError, OSError, ValueError) as error:
        raise UsageError(
            f"can't read {what}: {hide_credentials(str(error))}; a path is relative to the working directory, "
            "options of an object store go into params.names_options"
        ) from None
    if len(content) > MAX_SOURCE_BYTES:
        raise UsageError(f"{what} holds more than {MAX_SOURCE_BYTES // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
        document = json.loads(text) if suffix == ".json" else text.splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(document, list) or any(isinstance(entry, dict | list) for entry in document):
        raise UsageError(f'{what} is not a JSON list of names, as ["Luna", "Max"]')
    return document
