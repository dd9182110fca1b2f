"""Makes a version of a model from a run: its best checkpoint, and the small files that using it needs."""

from __future__ import annotations

from pathlib import Path

from ddptrain.errors import UsageError
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.checkpoint_verification import verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.layout import BEST, LATEST
from ddptrain.results.lookup import RunView, find_checkpoint
from ddptrain.storage.remote_folder import is_plain


def add_run(registry: ModelRegistry, model: str, view: RunView, which: str = BEST) -> VersionRecord:
    """Add a checkpoint of a run as the next version of a model; return the existing version if it was added before.

    which: best, latest, or the name of a checkpoint such as step-100.

    Raises:
        UsageError: the run has no checkpoint, or the checkpoint is not what its manifest says.
        StoreError: the registry cannot be written.
    """
    folder = find_checkpoint(view.layout, which)
    try:
        checkpoint = verify(folder)
    except CheckpointDamaged as error:
        raise UsageError(f"cannot add {folder} to model {model}: {error}; choose another with --checkpoint") from error
    pointer = f"{folder.name}\n".encode()
    sources: dict[str, Path | bytes] = {
        f"checkpoints/{BEST}": pointer,
        f"checkpoints/{LATEST}": pointer,
        **{f"checkpoints/{folder.name}/{name}": folder / name for name in checkpoint.files},
    }
    layout = view.layout
    small = [name for name in layout.artifacts() if name.endswith(".json") and is_plain(name)]
    for path in (layout.run_json, layout.config_yaml, *(layout.artifacts_dir / name for name in small)):
        if path.is_file():
            sources[path.relative_to(layout.root).as_posix()] = path
    return registry.add_version(
        model,
        sources,
        VersionRecord(
            model=model,
            version=0,  # this, the time and the files are filled in by add_version
            created_at="",
            files=(),
            run_id=view.run_id,
            workload=view.record.workload,
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            metrics=checkpoint.metrics,
            parent=registry.state(model).version_of("champion"),
            code=view.record.code.hash if view.record.code else (view.record.git.commit if view.record.git else ""),
            versions=view.record.versions,
        ),
    )
