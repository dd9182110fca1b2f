"""What foreign workers offer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Worker

from ddptrain.worker import foreign_worker


def worker(*, nthreads: int = 1, nanny: str | None = None, **resources: float) -> Worker:
    """The used part of a Dask worker."""
    state = SimpleNamespace(total_resources=resources, nthreads=nthreads)
    return cast(Worker, SimpleNamespace(plugins={}, state=state, nanny=nanny))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs; CUDA_VISIBLE_DEVICES selects some of them."""

    def visible(environ: dict[str, str]) -> tuple[str, ...]:
        return tuple(environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))

    monkeypatch.setattr(foreign_worker, "visible_gpus", visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("chosen", "known", "offered"),
    [
        (None, {}, (1, ())),  # dask worker without resources
        ("2,3,0,1", {}, (1, ("2",))),  # dask cuda worker rotates the list: the first GPU is its own
        (None, {"GPU": 1.0}, (1, ("0",))),  # Coiled
        (None, {"slot": 2.0, "nthreads": 8}, (2, ())),
        (None, {"slot": 4.0, "GPU": 2.0, "nthreads": 8}, (4, ("0", "1"))),
        ("3,1", {"slot": 4.0, "GPU": 4.0, "nthreads": 8}, (4, ("3", "1"))),
        (None, {"slot": 4.0, "nthreads": 2}, (2, ())),  # it has only two threads
    ],
)
def test_offer_is_a_slot_with_its_gpu_or_what_the_resources_say(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, known: dict[str, Any], offered: tuple[int, tuple[str, ...]]
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert foreign_worker.offered_slots(worker(**known)) == offered
