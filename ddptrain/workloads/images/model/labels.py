"""Finds the output of a pretrained model for each class: the class's name among the model's labels.

A wrong output would train and predict without an error. So nothing is guessed: an ambiguous name is an error.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddptrain.config.wording import listed, shorten
from ddptrain.errors import UsageError

_ID = re.compile(r"(n[0-9]{8})(?:[-_. ]+(.*))?", re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")
_NOT_LETTERS = re.compile(r"[\W_]+")
_MAX_CANDIDATES = 5


@dataclass(frozen=True, slots=True)
class Label:
    """The label of an output: synonyms as in 'tench, Tinca tinca', the usual name first.

    wordnet_id: as n01440764, if the labels have ids.
    """

    output: int
    text: str
    wordnet_id: str | None = None

    @property
    def names(self) -> list[str]:
        """The whole text, and each synonym."""
        return [self.text, *filter(None, (part.strip() for part in self.text.split(",")))]

    def __str__(self) -> str:
        return f"{self.output} '{shorten(self.text, 60)}'"


@dataclass(frozen=True)
class Labels:
    """The labels of all outputs of a model, by output; `source` is the file or URL for messages."""

    source: str
    labels: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """The text of each label."""
        return tuple(label.text for label in self.labels)

    @cached_property
    def by_id(self) -> dict[str, Label]:
        """The labels that have a WordNet id, by id."""
        return {label.wordnet_id: label for label in self.labels if label.wordnet_id is not None}

    @cached_property
    def _tiers(self) -> list[tuple[Callable[[str], str], dict[str, list[Label]]]]:
        """For each way to compare names, the strictest first: the function, and the labels by its result."""
        return [
            (form, _index(self.labels, form, synonyms=synonyms))
            for synonyms in (False, True)
            for form in (str, _spaced, _caseless, _letters)
        ]

    def called(self, name: str) -> tuple[list[Label], list[Label]]:
        """Return the labels that match a name by the strictest comparison with any result, and by the loosest."""
        candidates = (index.get(form(name), []) for form, index in self._tiers)
        form, index = self._tiers[-1]
        return next(filter(None, candidates), []), index.get(form(name), [])

    def like(self, name: str) -> list[Label]:
        """Return the labels that the user may have meant: most words in common, or else the most similar spelling."""
        words = set(_caseless(name).split())
        shared = {
            label: max(len(words & set(_caseless(synonym).split())) for synonym in label.names) for label in self.labels
        }
        most = sorted((label for label in self.labels if shared[label]), key=lambda label: -shared[label])
        if most:
            return most[:_MAX_CANDIDATES]
        form, index = self._tiers[-1]
        return [index[key][0] for key in difflib.get_close_matches(form(name)[:80], index, n=_MAX_CANDIDATES)]


@dataclass(frozen=True, slots=True)
class Match:
    """The output of a class; `remark` is a message if the names differ."""

    name: str
    label: Label
    remark: str = ""


def matches(classes: Sequence[str], labels: Labels) -> list[Match]:
    """Return the output of each class, by WordNet id or else by name.

    Remarks tell the user about names that differ in more than separators, and about names that a looser comparison
    also finds at another label. Raises UsageError, which lists all classes without a label, with several, or with that
    of another class.
    """
    matched: list[Match] = []
    problems: list[str] = []
    for name in classes:
        match = _match(name, labels)
        if isinstance(match, Match):
            matched.append(match)
        else:
            problems.append(match)
    problems += _collisions(matched)
    if problems:
        head = f"the labels of {labels.source} do not determine the output of each class:"
        advice = "rename the folder or the label, put WordNet ids (n02085620) on both, or leave the label map out"
        raise UsageError("\n  ".join([head, *problems, advice]))
    return matched


def _match(name: str, labels: Labels) -> Match | str:
    """Return the label of a class, or what is wrong."""
    parts = _ID.fullmatch(name)
    wordnet_id, text = (parts[1], parts[2] or "") if parts else (None, name)
    if wordnet_id is not None and labels.by_id:
        if wordnet_id in labels.by_id:
            return Match(name, labels.by_id[wordnet_id])
        return f"{shorten(name)}: no label has the id {wordnet_id}{_candidates(labels, text)}"
    if not text:
        return f"{shorten(name)}: the labels have no WordNet ids, and the folder's name is only an id"
    strict, loose = labels.called(text)
    if not strict:
        return f"{shorten(name)}: no label has this name{_candidates(labels, text)}"
    if len(strict) > 1:
        return f"{shorten(name)}: ambiguous, it may be {_listed(strict)}"
    return Match(name, strict[0], _remark(text, strict[0], [label for label in loose if label is not strict[0]]))


def _remark(text: str, label: Label, rivals: list[Label]) -> str:
    if rivals:
        return f"{shorten(text)} is taken for {label}, not for {_listed(rivals)}"
    if _spaced(text) not in map(_spaced, label.names):
        return f"{shorten(text)} is taken for {label}"
    return ""


def _collisions(matched: Iterable[Match]) -> list[str]:
    by_output: dict[Label, list[str]] = defaultdict(list)
    for match in matched:
        by_output[match.label].append(match.name)
    return [
        f"{', '.join(map(shorten, names))}: all of them are {label}" for label, names in by_output.items() if names[1:]
    ]


def _candidates(labels: Labels, text: str) -> str:
    near = labels.like(text) if text else []
    return f"; closest: {_listed(near)}" if near else ""


def _listed(labels: Sequence[Label]) -> str:
    return listed([str(label) for label in labels], _MAX_CANDIDATES, 80)


def _index(labels: Iterable[Label], form: Callable[[str], str], *, synonyms: bool) -> dict[str, list[Label]]:
    """Return labels by a form of their names: of the whole text and the usual name, or of all `synonyms`."""
    index: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        names = label.names if synonyms else label.names[:2]
        for key in {form(name) for name in names} - {""}:
            index[key].append(label)
    return dict(index)


def _spaced(name: str) -> str:
    """Return the name with one space instead of runs of spaces, _ and -."""
    return _SEPARATORS.sub(" ", name).strip()


def _caseless(name: str) -> str:
    """Return the name as _spaced does, also without case and accents."""
    plain = unicodedata.normalize("NFKD", _spaced(name))
    return "".join(char for char in plain if not unicodedata.combining(char)).casefold()


def _letters(name: str) -> str:
    """Return only the letters and digits: 'sheep dog' becomes 'sheepdog'."""
    return _NOT_LETTERS.sub("", _caseless(name))
