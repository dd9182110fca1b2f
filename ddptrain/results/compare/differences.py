"""Finds what differs between runs: parameters, configuration, code, data, versions, environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddptrain.file_ops import hash_file
from ddptrain.results.lookup import RunView
from ddptrain.results.select.recorded_config import config_of, params_of

Differences = dict[str, list[Any]]  # by name: the value of each run, None if the run has none
_MOST_KEYS = 5_000  # of one run: another user may have written its files
_DEEPEST = 30
_HASH_CHARACTERS = 12


def find_differences(views: Sequence[RunView]) -> dict[str, Differences]:
    """Return what is not the same in all runs, by section; a section in which nothing differs is empty."""
    return {section: differing([dict(flat(facts(view))) for view in views]) for section, facts in _SECTIONS.items()}


def differing(values: Sequence[Mapping[str, Any]]) -> Differences:
    """Return the names whose values differ between the mappings, in the order in which the names first occur."""
    names = dict.fromkeys(name for mapping in values for name in mapping)
    rows = {name: [mapping.get(name) for mapping in values] for name in names}
    return {name: row for name, row in rows.items() if len({_comparable(value) for value in row}) > 1}


def flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with names such as optimizer.lr, at most 5,000. A list is one value."""
    left = _MOST_KEYS
    pending = [(path, values, 0)]
    while pending and left > 0:
        name, value, depth = pending.pop()
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            below = [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
            pending += reversed(below[:left])
        elif name:
            left -= 1
            yield name, value


def _comparable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _config(view: RunView) -> Mapping[str, Any]:
    return {key: value for key, value in config_of(view).items() if key not in ("params", "workload")}


def _code(view: RunView) -> Mapping[str, Any]:
    record = view.record
    facts: dict[str, Any] = {"workload": record.workload}
    if record.git is not None:
        facts["git commit"] = record.git.commit[:_HASH_CHARACTERS]
        facts["uncommitted changes"] = record.git.dirty
    if record.code is not None:
        facts["uploaded code"] = record.code.hash[:_HASH_CHARACTERS]
        facts["uploaded files"] = record.code.files
    return facts


def _data(view: RunView) -> Mapping[str, Any]:
    """Return the SHA-256 of each file that describes the inputs, such as the list of images in inputs/manifest.json."""
    facts = {}
    try:
        paths = sorted(path for path in view.layout.inputs_dir.iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    for path in paths:
        try:
            facts[path.name] = f"sha256 {hash_file(path, safely=True)[1][:_HASH_CHARACTERS]}"
        except OSError:
            continue
    return facts


def _environment(view: RunView) -> Mapping[str, Any]:
    record = view.record
    ranks = record.attempts[-1].ranks if record.attempts else ()
    facts: dict[str, Any] = {"ranks": record.world_size, "hosts": sorted({rank.host for rank in ranks})}
    facts["GPUs"] = sum(rank.gpu is not None for rank in ranks)
    return facts | {name: item.value for name, item in sorted(record.rank_environment.items())}


_SECTIONS: Mapping[str, Callable[[RunView], Mapping[str, Any]]] = {
    "params": params_of,
    "config": _config,
    "code": _code,
    "data": _data,
    "versions": lambda view: view.record.versions,
    "environment": _environment,
}
