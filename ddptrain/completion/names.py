"""Names that exist on this machine: runs, clusters, models, configurations. Only folders are listed; nothing connects.

Folders of other users may contain anything: a name with characters that are special to a shell is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MOST = 5000  # entries of a folder that are read
_SHOWN = 200
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+/@=:,%")


def is_plain(word: str) -> bool:
    """Return whether a shell takes the word as it is, without quotes."""
    return bool(word) and _PLAIN.issuperset(word)


def run_ids(runs_dir: str) -> list[str]:
    """Return the ids of the newest runs of a folder, the newest first; none of an object store."""
    ids = []
    for entry in _entries(runs_dir):
        with suppress(OSError):
            if entry.is_dir() and os.path.exists(os.path.join(entry.path, "run.json")):
                ids.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(ids, reverse=True)[:_SHOWN]]


def cluster_names() -> list[str]:
    """Return the names of this user's clusters."""
    # The folder that platformdirs names, whose import takes longer than all of this.
    state = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.expanduser("~/.local/state")
    return _folders(os.path.join(state, "ddptrain", "clusters"), "cluster.json")


def models_dir() -> str:
    """Return the folder of the model registry if no option names another."""
    return os.environ.get("DDPTRAIN_MODELS_DIR") or "models"


def model_names(models_dir: str) -> list[str]:
    """Return the names of the models of a registry in a folder."""
    return _folders(models_dir, "history")


def model_references(models_dir: str, model: str) -> list[str]:
    """Return the aliases and versions of a model, as petnames@champion."""
    folder = os.path.join(models_dir, model)
    changes = sorted(entry.name for entry in _entries(os.path.join(folder, "history")) if entry.name.endswith(".json"))
    aliases: Iterable[str] = ()
    newest = os.path.join(folder, "history", changes[-1] if changes else "")
    with suppress(OSError, ValueError, KeyError, TypeError), open(newest, encoding="utf-8") as file:
        aliases = list(json.load(file)["aliases"])  # not if the file is damaged; versions remain
    versions = sorted((entry.name for entry in _entries(os.path.join(folder, "versions"))), reverse=True)
    return [f"{model}@{name}" for name in (*aliases, *versions) if is_plain(name)]


def configurations() -> dict[str, str]:
    """Return the shipped examples and the YAML files of the working directory: name -> path."""
    paths = {}
    for folder in (os.path.join(_PACKAGE, "configs"), os.path.join(os.path.dirname(_PACKAGE), "configs")):
        if os.path.isdir(folder):
            paths = {name[:-5]: os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _is_yaml(name)}
            break
    return paths | {entry.name: entry.path for entry in _entries(".") if _is_yaml(entry.name)}


def schema_file() -> str:
    """Return the path of the JSON schema that ships with the examples."""
    shipped = os.path.join(_PACKAGE, "configs", "ddptrain.schema.json")
    return shipped if os.path.exists(shipped) else os.path.join(os.path.dirname(_PACKAGE), *shipped.split(os.sep)[-2:])


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _folders(folder: str, content: str) -> list[str]:
    """Return the names of the folders in `folder` in which `content` exists."""
    names = (entry.name for entry in _entries(folder) if os.path.exists(os.path.join(entry.path, content)))
    return sorted(islice(names, _SHOWN))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries with plain names; none if the folder is missing, unreadable or a URL."""
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry in islice(entries, _MOST):
            if is_plain(entry.name) and not entry.name.startswith("."):
                yield entry
