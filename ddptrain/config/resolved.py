"""The configuration that a run carries: checked, completed, and in the form in which it is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddptrain.config.plugin_names import check_params, params_model
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.config.yaml_reader import scalar
from ddptrain.errors import UsageError
from ddptrain.redact import hide_known, hide_secrets, known_secrets


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A checked configuration, and everything that is derived from it; made once, by `resolve`.

    config: the typed configuration, with secrets and with `params` as the user wrote them.
    path: the YAML file; for data of a program, a file of the name "-" in the folder that relative paths refer to.
    recorded: all fields as plain data, with the defaults of the workload's params and without secrets.
    yaml_text: `recorded` as YAML, the content of config.yaml.
    secrets: the secret values, the longest first, which are removed from messages and events.
    import_folders: where user code is searched first: beside the YAML file, then in the working directory.
    place: where the workload is named, as FILE:LINE; "" if no file names it.
    """

    config: RunConfig = field(repr=False)
    path: Path
    recorded: Mapping[str, Any] = field(repr=False)
    yaml_text: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    import_folders: tuple[str, str]
    place: str = ""

    @property
    def changes(self) -> str:
        """The fields that differ from their defaults, as YAML without secrets."""
        changed = self.config.model_dump(exclude_defaults=True)
        if self.config.retrain is not None:  # a gate that is left out follows checkpoint.metric
            changed["retrain"]["gate"] = [rule.model_dump(exclude_defaults=True) for rule in self.config.retrain.gate]
        if params := _params(self.config, exclude_defaults=True):
            changed["params"] = params
        about = {"workload": changed["workload"], "name": self.config.name, **changed}
        return dump_yaml(hide_known(hide_secrets(about), self.config.notify.literal_urls))

    @property
    def retrain(self) -> RetrainConfig:
        """The section `retrain`. Raises UsageError if there is none."""
        if self.config.retrain is None:
            example = f"retrain: {{model: {self.config.name}}}"
            raise UsageError(f"{self.path} has no section retrain, which names the model: add for example {example}")
        return self.config.retrain


def resolve(config: RunConfig, path: Path, place: str = "") -> ResolvedConfig:
    """Fill in the defaults, remove the secrets and serialize the configuration of the file `path`."""
    complete = config.model_dump()
    urls = config.notify.literal_urls
    recorded = hide_known(hide_secrets({**complete, "params": _params(config)}), urls)
    secrets = tuple(sorted({*known_secrets(complete), *urls}, key=len, reverse=True))
    return ResolvedConfig(config, path, recorded, dump_yaml(recorded), secrets, import_folders(path), place)


def import_folders(path: Path) -> tuple[str, str]:
    """Return where user code is searched first: beside the YAML file, then in the working directory."""
    return (str(path.resolve().parent), os.getcwd())


def _params(config: RunConfig, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Return the params, with or without those that have the default of the workload's model."""
    model = params_model(config.workload) if isinstance(config.workload, str) else None
    if model is None:
        return dict(config.params)
    return check_params(model, config.params).model_dump(mode="json", exclude_defaults=exclude_defaults)


class _Dumper(yaml.SafeDumper):
    """Writes what yaml_reader.py reads back equal: quotes text that would be read as another type; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # By default PyYAML folds U+0085 and similar characters into a blank.
        style = None if _is_text(value) and value.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _Dumper.text)


def _is_text(value: str) -> bool:
    try:
        return isinstance(scalar(value), str)
    except ValueError:
        return False


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML that yaml_reader.py reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
