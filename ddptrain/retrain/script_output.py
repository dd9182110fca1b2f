"""What a script writes for `ddptrain retrain`: its model, and the metrics of the model."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddptrain.config.run_config import ScriptWorkload
from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256
from ddptrain.results.metrics import is_number

_METRICS_BYTES = 1 << 20


def output_states(script: ScriptWorkload | None) -> dict[str, str]:
    """Return the states of the outputs that a script declares, to see after the run whether it has written them."""
    if script is None:
        return {}
    outputs = {"workload.checkpoint": script.checkpoint, "workload.metrics": script.metrics}
    return {field: output_state(path) for field, path in outputs.items() if path is not None}


def output_state(path: str) -> str:
    """Return a digest of the times, sizes and inodes of a file, or of the files in a folder; "" if there are none."""
    place = Path(path).expanduser()
    states = []
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        with suppress(OSError):
            status = file.stat()
            states.append(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return sha256("\n".join(states).encode()).hexdigest() if states else ""


def read_metrics(path: Path) -> dict[str, float]:
    """Read the metrics that a script has written: a JSON object of names and numbers, also NaN. Raises UsageError."""
    try:
        with path.open("rb") as file:
            raw: Any = json.loads(file.read(_METRICS_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{path} is not JSON ({shorten(str(error))}); write an object such as {{"val/loss": 2.1}}'
        ) from None
    numbers = isinstance(raw, dict) and all(map(is_number, raw.values()))
    if not numbers:
        raise UsageError(f'{path} must have names and numbers, such as {{"val/loss": 2.1}}, not {shorten(repr(raw))}')
    return {str(name): float(value) for name, value in raw.items()}
