"""Some names that the model writes at the end of its training, as a table for trackers and the report page."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ddptrain.workloads.petnames.alphabet import display
from ddptrain.workloads.petnames.model import CharacterModel
from ddptrain.workloads.petnames.sampling import sample_names

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

TABLE = "generated_names"
COLUMNS = ("name", "is_known")
_LONGEST = 20  # characters: a model that has learned little ends few names, and reading them takes long
_TEMPERATURE = 0.8  # as `ddptrain generate` has it


def log_generated_names(
    ctx: RankContext, model: CharacterModel, known: Iterable[str], count: int, seed: int, step: int
) -> None:
    """Log the table generated_names: the distinct names among `count` tries, and whether they are in `known`.

    The random state of the training is not used, and the model stays as it is. Raises OSError as ctx.log_table does.
    """
    reader = copy.deepcopy(model).cpu().eval()
    draw = torch.Generator().manual_seed(seed)
    written = sample_names(reader, count, "", _TEMPERATURE, draw, _LONGEST)
    data = set(known)
    rows = [(display(name), name in data) for name in dict.fromkeys(written) if name and name.strip()]
    ctx.log_table(TABLE, COLUMNS, rows, step=step)
