"""Reads the configuration that a run has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ddptrain.results.lookup import RunView
from ddptrain.results.secure_files import read_bytes

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml: ten times as fast, missing on some platforms


def params_of(view: RunView) -> Mapping[str, Any]:
    """Return the parameters of a run; those of runs of older versions are in config.yaml alone."""
    if view.record.params is not None:
        return view.record.params
    params = config_of(view).get("params")
    return params if isinstance(params, dict) else {}


def config_of(view: RunView) -> Mapping[str, Any]:
    """Return the configuration of a run; an empty one if config.yaml is missing or damaged."""
    try:
        return parsed_config(read_bytes(view.layout.config_yaml))
    except OSError:
        return {}


def parsed_config(text: str | bytes) -> Mapping[str, Any]:
    """Parse a config.yaml; the result is empty if it is damaged."""
    try:
        config = yaml.load(text, Loader=_Loader)  # noqa: S506  # it is a safe loader
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
