"""Fetches the weights that `params.weights: model:NAME@ALIAS` names, and records which version they are of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.errors import UsageError
from ddptrain.file_ops import atomic_file, hash_file
from ddptrain.log import Log
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.reference import parse_reference
from ddptrain.model_registry.registry import ModelRegistry, open_version
from ddptrain.protocol.rank_spec import (
    FILE,
    PARAM,
    PREFIX,
    StartingWeights,
    names_model,
    same_model,
    with_weights,
)
from ddptrain.results.errors import results_errors
from ddptrain.results.recorded_config import parsed_config
from ddptrain.results.run import Run
from ddptrain.results.secure_files import make_folder, read_bytes

_MODEL_FILE = "model.safetensors"
_MAX_MANIFEST_BYTES = 1 << 30
_log = Log(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A verified file of a version, and its record."""

    file: Path
    record: StartingWeights

    def put(self, folder: Path) -> None:
        """Copy the weights into the inputs of a run, unless they are there.

        Raises UsageError if the file has changed since it was verified; ResultsError.
        """
        if StartingWeights.read(folder) == self.record and (folder / FILE).is_file():
            return
        make_folder(folder)
        with results_errors(folder):
            with atomic_file(folder / FILE) as copy, self.file.open("rb") as source:
                while chunk := source.read(1 << 22):
                    copy.write(chunk)
            if hash_file(folder / FILE)[1] != self.record.sha256:
                (folder / FILE).unlink()
                raise UsageError(f"{self.file} has changed while it was copied: start again")
            self.record.write(folder)


def fetch_weights(resolved: ResolvedConfig, resumed: Path | None) -> tuple[ResolvedConfig, FetchedWeights | None]:
    """Return the configuration with the number of the version in place of an alias, and the weights.

    resumed: the directory of a run that is resumed; it keeps the version that it began with. Return no weights if the
    configuration names no model.

    Raises UsageError if there is no such version; RegistryDamaged if a file of it is damaged; StoreError.
    """
    config = resolved.config
    wanted = config.params.get(PARAM)
    if not (is_built_in(config.workload) and names_model(wanted)):
        return resolved, None
    before = _recorded(resumed) if resumed is not None else None
    reference = str(before if same_model(before, wanted) else wanted)
    if reference == before and resumed is not None and _is_complete(Run(resumed).inputs_dir, reference):
        return _pinned(resolved, reference), None
    registry = ModelRegistry.open(config.models.dir)
    try:
        record = registry.resolve(parse_reference(reference.removeprefix(PREFIX)))
    except UsageError as error:
        raise UsageError(f"params.{PARAM}: {error}; models.dir is {config.models.dir}") from error
    if record.workload != config.workload:
        raise UsageError(
            f"params.{PARAM}: {reference} is a model of the workload {record.workload}, not of {config.workload}"
        )
    weights = _weights_of(record, open_version(registry, record))
    _log.info("starting weights", wanted=str(wanted), version=weights.record.version, sha256=weights.record.sha256)
    return _pinned(resolved, weights.record.reference), weights


def _weights_of(record: VersionRecord, folder: Path) -> FetchedWeights:
    for file in record.files:
        if file.path.startswith("checkpoints/") and file.path.endswith(f"/{_MODEL_FILE}"):
            path = folder / file.path
            weights = StartingWeights(record.model, record.version, file.sha256, _classes(folder))
            return FetchedWeights(path, weights)
    raise UsageError(f"params.{PARAM}: version {record.version} of {record.model} has no file {_MODEL_FILE}")


def _classes(folder: Path) -> tuple[str, ...]:
    """Return the classes of the images that a version was trained on; none if it has no list of images."""
    path = folder / "inputs" / "manifest.json"
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        return ()
    try:
        return tuple(str(name) for name in json.loads(path.read_bytes())["classes"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()


def _recorded(run_dir: Path) -> str | None:
    """Return the parameter `weights` in the config.yaml of a run; None if there is none."""
    try:
        params = parsed_config(read_bytes(Run(run_dir).config_yaml)).get("params")
    except OSError:
        return None
    weights = params.get(PARAM) if isinstance(params, Mapping) else None
    return weights if isinstance(weights, str) else None


def _is_complete(inputs: Path, reference: str) -> bool:
    record = StartingWeights.read(inputs)
    try:
        return record is not None and record.reference == reference and hash_file(inputs / FILE)[1] == record.sha256
    except OSError:
        return False


def _pinned(resolved: ResolvedConfig, reference: str) -> ResolvedConfig:
    config = resolved.config.model_copy(update={"params": with_weights(resolved.config.params, reference)})
    return dataclasses.replace(resolve(config, resolved.path), import_folders=resolved.import_folders)
