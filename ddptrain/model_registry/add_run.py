"""Makes a version of a model from a run: its best checkpoint, and the small files it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddptrain.config.resolved import dump_yaml
from ddptrain.errors import UsageError
from ddptrain.file_ops import temp_folder
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.reference import CHAMPION
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.protocol.tensor_slices import is_sharded_checkpoint
from ddptrain.results.checkpoints.consolidation import consolidate
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.layout import BEST, LATEST
from ddptrain.results.recorded_config import is_own_record, of_the_model, parsed_config
from ddptrain.results.run import MODEL, Run
from ddptrain.results.secure_files import read_bytes
from ddptrain.storage.store import is_plain

LISTING = "manifest.json"  # of images, in inputs/: with it the same images are held out in each evaluation


def add_run(registry: ModelRegistry, model: str, view: Run, which: str = BEST, **known: Any) -> VersionRecord:
    """Add a checkpoint of a run as the next version of a model; return the existing version if it was added before.

    which: best, latest, or the name of a checkpoint such as step-100. known: what `ddptrain retrain` knows about the
    version: the fields data, held_out, config and evaluation of its record.

    Raises:
        UsageError: the run has no checkpoint, or the checkpoint is not what its manifest says.
        StoreError: the registry cannot be written.
    """
    folder = view.fetch(*MODEL).checkpoint(which)
    try:
        checkpoint = verify(folder)
    except CheckpointDamaged as error:
        raise UsageError(f"cannot add {folder} to model {model}: {error}; choose another with --checkpoint") from error
    pointer = f"{folder.name}\n".encode()
    sources: dict[str, Path | bytes] = {f"checkpoints/{BEST}": pointer, f"checkpoints/{LATEST}": pointer}
    small = [name for name in view.artifacts() if name.endswith(".json") and is_plain(name)]
    sources |= _existing(view, *(view.artifacts_dir / name for name in small), view.inputs_dir / LISTING)
    run = view.record
    record = VersionRecord(
        model=model,
        version=0,  # number, time and files are filled in by add_version
        created_at="",
        files=(),
        run_id=view.run_id,
        workload=run.workload,
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        metrics=checkpoint.metrics,
        parent=registry.state(model).version_of(CHAMPION),
        code=run.code.hash if run.code else (run.git.commit if run.git else ""),
        versions=run.versions,
        **known,
    )
    with _whole(folder, checkpoint.files) as (whole, names):
        sources |= {f"checkpoints/{folder.name}/{name}": whole / name for name in names}
        return registry.add_version(model, sources, record)


@contextmanager
def _whole(checkpoint: Path, names: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A checkpoint with one file of weights, and its files: of a sharded model a temporary copy."""
    if not is_sharded_checkpoint(checkpoint):
        yield checkpoint, names
        return
    with temp_folder("ddptrain-consolidate-") as scratch:
        made = consolidate(checkpoint, scratch / checkpoint.name, max_file_bytes=sys.maxsize)
        yield made.folder, made.files


def _existing(layout: Run, *others: Path) -> dict[str, Path | bytes]:
    """Return the records of the run, and other files of it, by their paths in the run directory.

    The version is a folder of this user: of another user's configuration it gets the part that evaluate may use.
    """
    root = layout.root.resolve()
    paths = [path for path in (layout.run_json, layout.config_yaml, *others) if path.is_file()]
    found: dict[str, Path | bytes] = {
        path.relative_to(layout.root).as_posix(): path
        for path in paths
        if path.resolve() == root / path.relative_to(layout.root)
    }
    name = layout.config_yaml.name
    if name in found and not is_own_record(layout.config_yaml):
        found[name] = dump_yaml(of_the_model(parsed_config(read_bytes(layout.config_yaml)))).encode()
    return found
