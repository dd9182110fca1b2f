"""Reads the configuration that a run has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.results.run import Run
from ddptrain.results.secure_files import is_own_folder, read_bytes


def params_of(view: Run) -> Mapping[str, Any]:
    """Return the parameters of a run; those of runs of older versions are in config.yaml alone."""
    if view.record.params is not None:
        return view.record.params
    params = config_of(view).get("params")
    return params if isinstance(params, dict) else {}


def config_of(view: Run) -> Mapping[str, Any]:
    """Return the configuration of a run; an empty one if config.yaml is missing or damaged."""
    try:
        return parsed_config(read_bytes(view.config_yaml))
    except OSError:
        return {}


def parsed_config(text: str | bytes) -> Mapping[str, Any]:
    """Parse a config.yaml; the result is empty if it is damaged."""
    import yaml  # 10 ms, which records of this version do not need

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml: ten times as fast, missing on some platforms
    try:
        config = yaml.load(text, Loader=loader)  # noqa: S506  # it is a safe loader
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_own_record(path: Path) -> bool:
    """Return whether this user has written a file of a run: it is no copy of a run or version in a store either."""
    from platformdirs import user_cache_path

    copies = user_cache_path("ddptrain", appauthor=False)
    is_own = is_own_folder(path.parent) and path.lstat().st_uid == path.parent.stat().st_uid
    return is_own and not path.absolute().is_relative_to(copies)


def of_the_model(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of another user's configuration that names no program, variable, host or folder of files.

    `evaluate` is a program: RUNS.RUN.MODULE:FUNCTION would be a file in the directory of the other user's run.
    """
    kept = {key: recorded[key] for key in ("workload", "name", "prepare", "dist") if key in recorded}
    params, cluster = recorded.get("params"), recorded.get("cluster")
    if isinstance(params, Mapping):
        kept["params"] = {key: value for key, value in params.items() if not str(key).endswith("_options")}
    if isinstance(cluster, Mapping) and "ranks" in cluster:
        kept["cluster"] = {"ranks": cluster["ranks"]}
    return kept
