"""The configuration of a run, and how it differs from the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config import plugin_names
from ddptrain.config.load import load_data
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError
from ddptrain.redact import hide_secrets
from ddptrain.results.compare import flat
from ddptrain.results.secure_files import read_bytes

_MOST = 1000
_CHARACTERS = 300
_ANY = "petnames"  # what must be given has no default


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration; `default` is None if it has none. The values are texts."""

    key: str
    value: str
    default: str | None

    @property
    def is_changed(self) -> bool:
        """Whether the value is not the default."""
        return self.value != self.default


def read_settings(path: Path) -> list[Setting]:
    """Return the settings of a config.yaml; none if it cannot be read."""
    try:
        data = load_data(read_bytes(path), path.name)
    except (OSError, DdptrainError):
        return []
    if not isinstance(data, dict):
        return []
    defaults = dict(flat(_defaults(data.get("workload"))))
    found: list[Setting] = []
    for key, value in flat(hide_secrets(data)):
        text = _text(value)
        default = _text(defaults[key]) if key in defaults else None
        if len(found) >= _MOST:
            break
        found.append(Setting(shorten(key, _CHARACTERS), text, default))
    return found


def _defaults(workload: object) -> dict[str, Any]:
    """Return the complete configuration of a workload with nothing but defaults."""
    is_built_in = isinstance(workload, str) and workload in plugin_names.BUILT_IN
    model = plugin_names.params_model(str(workload)) if is_built_in else None
    fields = model.model_fields.items() if model is not None else ()
    params = {name: one.get_default(call_default_factory=True) for name, one in fields if not one.is_required()}
    defaults = RunConfig.model_validate({"workload": _ANY, "name": _ANY}).model_dump(mode="json")
    return {name: value for name, value in defaults.items() if value != _ANY} | {"params": params}


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # 1.0 and 1 are the same setting
    return shorten(str(value), _CHARACTERS)
