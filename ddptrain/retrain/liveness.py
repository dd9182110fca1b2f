"""Whether a process retrains a model now, as readers see it: they take no lock."""

from __future__ import annotations

from pathlib import Path

from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.results.ownership import run_lock
from ddptrain.results.remote.lease import LOCK, claim_from
from ddptrain.storage.remote_folder import RemoteFolder


def is_being_retrained(registry: RemoteFolder, model: str) -> bool:
    """Return whether a process holds the lock of the model; False if this host cannot see it. Raises StoreError."""
    folder = registry.below(model).below("retrainings")
    if isinstance(folder.store, OwnFolder):
        return run_lock.is_held(Path(folder.store.location.url, folder.path, LOCK))
    claim = claim_from(folder.read(LOCK))
    return claim is not None and claim.is_held(claim.age_s)
