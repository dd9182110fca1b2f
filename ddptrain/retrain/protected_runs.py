"""Which runs the registry of models needs, so that no cleanup deletes them."""

from __future__ import annotations

from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.retrain.records import RetrainRecords, RetrainStatus

_CONTINUES = frozenset((RetrainStatus.RUNNING, RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED))


def protected_runs(registry: ModelReader) -> dict[str, str]:
    """Return the runs that must stay: run id -> the reason, as "champion of petnames".

    These are the runs of versions with an alias or a pin, and the runs that an unfinished retraining continues.

    Raises StoreError or RegistryDamaged if that cannot be read: then nothing may be deleted.
    """
    reasons: dict[str, str] = {}
    for model in registry.models():
        state = registry.state(model)
        for record in registry.versions(model):
            roles = state.aliases_of(record.version) + (["pinned"] if record.version in state.pinned else [])
            if roles:
                reasons[record.run_id] = f"{', '.join(roles)} of {model}"
        for retraining in RetrainRecords(registry.folder, model).newest(1):
            if retraining.status in _CONTINUES:
                reasons[retraining.run_id] = f"retraining {retraining.number} of {model} continues it"
    return reasons
