"""Which runs the registry of models needs, so that no cleanup deletes them."""

from __future__ import annotations

from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.retrain.plan import is_resumable
from ddptrain.retrain.records import RetrainRecords, RetrainStatus

_LOOKED_AT = 50  # retrainings of each model


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
        newest = RetrainRecords(registry.folder, model).newest(_LOOKED_AT)
        last = next((each for each in newest if each.status != RetrainStatus.ABANDONED), None)
        for each in newest:
            # With `overlap: allow` several are running. Of the others, only the last one is continued.
            if each.run_id and (each.is_running or (each is last and is_resumable(each))):
                reasons.setdefault(each.run_id, f"retraining {each.number} of {model} is not finished")
    return reasons
