"""What TAB completes beside commands and options: runs, clusters, models, configurations. Only folders are listed.

Folders of other users may contain anything: a name with characters that are special to a shell is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

_MOST = 5000  # entries of a folder that are read
_SHOWN = 200
_YAML = (".yaml", ".yml")
_PLAIN = re.compile(r"[\w.@+-]+", re.ASCII)


def runs(ctx: Any, incomplete: str) -> list[str]:
    """Return the newest runs of the runs folder, the newest first."""
    folder = str(ctx.find_root().params.get("runs_dir") or "runs")
    found = []
    for entry in _entries(folder):
        with suppress(OSError):
            if os.path.exists(os.path.join(entry.path, "run.json")):
                found.append((entry.stat().st_mtime, entry.name))
    return _beginning(["latest", *(name for _, name in sorted(found, reverse=True)[:_SHOWN])], incomplete)


def runs_or_models(ctx: Any, incomplete: str) -> list[str]:
    """Return runs, and models with their aliases and versions."""
    return [*runs(ctx, incomplete), *models(ctx, incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Return the names of this user's clusters."""
    from platformdirs import user_state_path

    return _beginning(
        _having(str(user_state_path("ddptrain", appauthor=False) / "clusters"), "cluster.json"), incomplete
    )


def models(ctx: Any, incomplete: str) -> list[str]:
    """Return the models of the registry; after the @ of one, its aliases and versions."""
    folder = str(ctx.find_root().params.get("models_dir") or os.environ.get("DDPTRAIN_MODELS_DIR") or "models")
    known = _having(folder, "history")
    model, at, _ = incomplete.partition("@")
    if not at or model not in known:
        return _beginning(known, incomplete)
    names = sorted((entry.name for entry in _entries(os.path.join(folder, model, "versions"))), reverse=True)
    changes = sorted(entry.name for entry in _entries(os.path.join(folder, model, "history")))
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # a damaged file has no aliases to complete
        newest = Path(folder, model, "history", changes[-1])
        names = [*json.loads(newest.read_text(encoding="utf-8"))["aliases"], *names]
    return _beginning([f"{model}@{name}" for name in names], incomplete)


def configurations(incomplete: str) -> list[str]:
    """Return the shipped examples and the YAML files of the working directory; nothing for a path: the shell has it."""
    if "/" in incomplete:
        return []
    from ddptrain.config.config_file import shipped_configs

    return _beginning(
        [*shipped_configs(), *(each.name for each in _entries(".") if each.name.endswith(_YAML))], incomplete
    )


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def _having(folder: str, content: str) -> list[str]:
    """Return the names of the folders in `folder` that contain `content`."""
    return sorted(each.name for each in _entries(folder) if os.path.exists(os.path.join(each.path, content)))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from islice(entries, _MOST)
