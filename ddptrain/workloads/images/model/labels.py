"""Finds the output of a pretrained model for each class, by the labels of its outputs in a JSON file.

A wrong output would train and predict without an error. So nothing is guessed: names must be equal.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ddptrain.config.wording import listed, nearest, shorten
from ddptrain.errors import UsageError

_ID = r"n[0-9]{8}"
_FOLDER_WITH_ID = re.compile(rf"({_ID})(?:[-_. ].*)?", re.DOTALL)
_Text = Annotated[str, Field(min_length=1, max_length=2000)]
_FILE = TypeAdapter(dict[int, _Text | tuple[Annotated[str, Field(pattern=f"^{_ID}$")], _Text]])
_FORM = 'expected JSON as {"0": "tench", "1": "goldfish"}, or {"0": ["n01440764", "tench"]} with WordNet ids'
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of all outputs of a model; the outputs by label and WordNet id; `source` is the file for messages."""

    source: str
    names: tuple[str, ...]
    outputs: Mapping[str, Sequence[int]]


def read_labels(path: Path, n_outputs: int | None = None) -> Labels:
    """Return the labels in a file; for a model with `n_outputs`, if that is known.

    Raises UsageError if it is unreadable, or has not one label for each output.
    """
    try:
        found = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"can't read the labels {path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"][:1]))
        raise UsageError(f"no labels in {path}: {f'{where}: ' if where else ''}{first['msg']}; {_FORM}") from None
    n_expected = len(found) if n_outputs is None else n_outputs
    if not found or found.keys() != set(range(n_expected)):
        raise UsageError(
            f"the labels of {path} are {len(found):,}, from output {min(found, default=0):,} to "
            f"{max(found, default=0):,}: expected one for each output of the model, from 0 to {n_expected - 1:,}"
        )
    outputs: dict[str, list[int]] = defaultdict(list)
    for output, label in found.items():
        for name in {label} if isinstance(label, str) else {*label}:
            outputs[name].append(output)
    names = [label if isinstance(label, str) else label[1] for _, label in sorted(found.items())]
    return Labels(str(path), tuple(names), outputs)


def outputs_of(classes: Sequence[str], labels: Labels) -> list[int]:
    """Return the output of each class: the one with its WordNet id, as in n01440764-tench, or with its name as label.

    Raises UsageError, which lists all classes without an output, with several, or with that of another class.
    """
    by_class = {name: _outputs(name, labels) for name in classes}
    of_output: dict[int, list[str]] = defaultdict(list)
    problems = []
    for name, outputs in by_class.items():
        if len(outputs) == 1:
            of_output[outputs[0]].append(shorten(name))
        elif outputs:
            problems.append(f"{shorten(name)}: outputs {', '.join(map(str, outputs))} have this label")
        else:
            near = nearest(name, labels.outputs)
            problems.append(f"{shorten(name)}: no label has its name or id{f', did you mean {near}?' if near else ''}")
    problems += [f"{', '.join(names)}: all have the label of output {n}" for n, names in of_output.items() if names[1:]]
    if problems:
        raise UsageError(
            f"{labels.source} does not determine the output of each class: {listed(problems, _MOST_NAMED, 200)}; "
            "rename the folder or the label, or leave params.label_map out"
        )
    return [by_class[name][0] for name in classes]


def _outputs(name: str, labels: Labels) -> Sequence[int]:
    with_id = _FOLDER_WITH_ID.fullmatch(name)
    return labels.outputs.get(name, ()) or (labels.outputs.get(with_id[1], ()) if with_id else ())
