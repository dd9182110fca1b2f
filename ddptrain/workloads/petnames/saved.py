"""What a finished (or running) run left on disk for generate: the model, and the names of its list."""

from __future__ import annotations

import json
from pathlib import Path

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.alphabet import normalise
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.saved import load_saved


def load_model(run_dir: Path) -> tuple[CharacterModel, str]:
    """The model of a run's best checkpoint, or else the latest, ready to predict on the CPU; and its folder's name.

    Raises:
        UsageError: the run is of another workload, or has no checkpoint that can be read.
    """
    return load_saved(run_dir, "petnames", "generate", lambda saved: CharacterModel(ModelConfig.restored(saved)))


def known_names(run_dir: Path) -> set[str]:
    """Every name of the list that the run was given, trained on or held out, in normal form.

    Raises:
        UsageError: the run did not leave them.
    """
    path = run_dir / "artifacts" / "names.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {normalise(name) for names in (saved["train"], saved["held_out"]) for name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"can't tell which names the run was trained on: {path}: {type(error).__name__}: {error}; "
            "--keep-known does without"
        ) from error
