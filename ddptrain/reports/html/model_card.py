"""A model of the registry: its versions with their metrics, and its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.model_registry.model_reader import ModelReader, ModelState
from ddptrain.model_registry.records import Change, VersionRecord
from ddptrain.model_registry.reference import parse_reference

_MOST = 200  # versions and changes, the newest ones
_MOST_METRICS = 8


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model; `chosen` is the version that was asked for. versions, history: the newest first.

    metrics: names of the metrics of the versions, evaluations first; those that most versions have.
    """

    name: str
    where: str
    chosen: VersionRecord
    state: ModelState
    versions: Sequence[VersionRecord]
    history: Sequence[Change]
    metrics: Sequence[str]

    def values(self, version: VersionRecord) -> Mapping[str, float]:
        """The metrics of a version; those of its evaluation win over those of its checkpoint."""
        return {**version.metrics, **version.evaluation}


def read_model(reader: ModelReader, name: str) -> ModelCard:
    """Read a model, named as on the command line. Raises UsageError, RegistryDamaged, StoreError."""
    reference = parse_reference(name)
    chosen = reader.resolve(reference)
    versions = reader.versions(reference.model)[-_MOST:][::-1]
    counts: dict[str, int] = {}
    for version in versions:
        for metric in {**version.evaluation, **version.metrics}:
            counts[metric] = counts.get(metric, 0) + 1
    metrics = sorted(counts, key=lambda metric: -counts[metric])[:_MOST_METRICS]
    return ModelCard(
        reference.model,
        reader.where,
        chosen,
        reader.state(reference.model),
        versions,
        reader.history(reference.model)[-_MOST:][::-1],
        metrics,
    )
