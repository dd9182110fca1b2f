"""Whether a run's own weights are of its model: looked at once, before any rank is started, by a process with torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.config.wording import shown
from ddptrain.redact import hide_credentials
from ddptrain.workloads.images.model.init import weights_file
from ddptrain.workloads.images.model.models import describe, outline
from ddptrain.workloads.images.model.preflight import (
    BadWeights,
    WeightsNotReached,
    check_weights_file,
    is_weights_url,
)
from ddptrain.workloads.images.model.weights import fit, read

if TYPE_CHECKING:
    from torch import Tensor

    from ddptrain.workloads.images.model.labels import Labels
    from ddptrain.workloads.images.params import ImagesParams

_TELL_EVERY_S = 10.0


def check_weights_fit(
    settings: ImagesParams, classes: Sequence[str], labels: Labels | None, tell: Callable[[str], None]
) -> None:
    """Pass where params.weights, a path or a URL, has what the model takes, or can't be reached from this host.

    A URL is fetched to where the ranks of this host look for it, so that they need not.

    Raises: BadWeights; UsageError where there is no such model for images of that size.
    """
    weights = str(settings.weights)
    try:
        path = weights_file(settings, weights, _Telling(hide_credentials(weights), tell).progress, tell)
    except WeightsNotReached as error:
        tell(f"{error} (the training begins all the same, for its ranks may get them)")
        return
    if is_weights_url(weights):
        source = shown(hide_credentials(weights), 300)
        state = _fetched(path, source)
    else:
        source = shown(str(path.absolute()), 300)
        state = read(path, source, lazily=True)
    names = None if labels is None else labels.names
    model_config = describe(settings.architecture, settings.image_size, classes, output_names=names)
    fit(outline(model_config), state, model_config, source, keep_head=labels is not None)


def _fetched(path: Path, source: str) -> Mapping[str, Tensor]:
    """The tensors of a file that was fetched, which is deleted where it holds none: next time there may be others."""
    try:
        check_weights_file(path, source)
        return read(path, source, lazily=True)
    except BadWeights:
        path.unlink(missing_ok=True)
        raise


class _Telling:
    """Says now and then how far a file is fetched."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self._what, self._tell = what, tell
        self._next = time.monotonic() + _TELL_EVERY_S

    def progress(self, done: float, total: float | None) -> None:
        """Megabytes done, and of how many."""
        if time.monotonic() > self._next:
            self._next = time.monotonic() + _TELL_EVERY_S
            self._tell(f"fetching {self._what}: {done:,.0f}{f' of {total:,.0f}' if total else ''} MB so far")
