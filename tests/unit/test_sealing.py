"""What is sealed for a worker is read by that worker alone."""

from __future__ import annotations

import json

import pytest

from ddptrain.errors import ClusterError
from ddptrain.sealing import SEALED, Opener, seal

ENV = {"WANDB_API_KEY": "k" * 40, "NAME": "münchen"}


def test_sealed_environment_is_opened_by_its_worker() -> None:
    worker = Opener()
    sealed = seal(ENV, worker.public, "run/1/0")
    assert list(sealed) == [SEALED]
    assert "kkkk" not in json.dumps(sealed)
    assert worker.open(sealed, "run/1/0") == ENV


def test_same_environment_never_looks_the_same() -> None:
    worker = Opener()
    assert seal(ENV, worker.public, "a") != seal(ENV, worker.public, "a")


def test_other_workers_and_other_ranks_are_refused() -> None:
    worker = Opener()
    sealed = seal(ENV, worker.public, "run/1/0")
    for opener, purpose in ((Opener(), "run/1/0"), (worker, "run/1/1")):
        with pytest.raises(ClusterError, match="not sealed for this worker"):
            opener.open(sealed, purpose)
    with pytest.raises(ClusterError, match="not sealed for this worker"):
        worker.open({SEALED: "AAAA"}, "run/1/0")


def test_empty_environment_costs_nothing_and_an_open_one_is_taken_as_it_is() -> None:
    assert seal({}, "", "a") == {}
    assert Opener().open(ENV, "a") == ENV
