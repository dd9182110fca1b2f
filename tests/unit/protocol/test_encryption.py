"""What is sealed for a worker is read by that worker alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddptrain.errors import ClusterError
from ddptrain.protocol.encryption import SEALED, WorkerKey, decrypt_spec, encrypt_spec, has_secrets, seal
from ddptrain.protocol.rank_spec import RankSpec, TrackerSpec, TrackingSpec
from tests.unit.specs import make_spec

ENV = {"WANDB_API_KEY": "k" * 40, "NAME": "münchen"}


def test_sealed_environment_is_opened_by_its_worker() -> None:
    worker = WorkerKey()
    sealed = seal(ENV, worker.public, "run/1/0")
    assert list(sealed) == [SEALED]
    assert "kkkk" not in json.dumps(sealed)
    assert worker.open(sealed, "run/1/0") == ENV


def test_same_environment_never_looks_the_same() -> None:
    worker = WorkerKey()
    assert seal(ENV, worker.public, "a") != seal(ENV, worker.public, "a")


def test_other_workers_and_other_ranks_are_refused() -> None:
    worker = WorkerKey()
    sealed = seal(ENV, worker.public, "run/1/0")
    for opener, purpose in ((WorkerKey(), "run/1/0"), (worker, "run/1/1")):
        with pytest.raises(ClusterError, match="not sealed for this worker"):
            opener.open(sealed, purpose)
    with pytest.raises(ClusterError, match="not sealed for this worker"):
        worker.open({SEALED: "AAAA"}, "run/1/0")


OWN = {"login": {"password": ["hush-hush"]}, "url": "http://me:hush-hush@there", "every": 3}


@pytest.mark.parametrize("env", [{}, ENV])
def test_options_of_trackers_that_hold_secrets_are_sealed_with_the_environment(env: dict[str, str]) -> None:
    worker = WorkerKey()
    tracking = TrackingSpec((TrackerSpec("a:B", OWN),), strict=True)
    spec = make_spec(env=env, tracking=tracking)
    assert "hush-hush" not in repr(spec)
    assert has_secrets(spec)
    sealed = encrypt_spec(spec, worker.public)
    assert "hush-hush" not in sealed.to_json()
    assert sealed.tracking is not None and sealed.tracking.trackers[0].options["every"] == 3
    assert decrypt_spec(sealed, worker) == spec


@pytest.mark.parametrize("env", [{}, ENV])
@pytest.mark.parametrize(
    "fields",
    [
        {"params": {"source_options": {"secret": "hush-hush", "anon": False}, "epochs": 3}},
        {"params": {"url": "https://account.blob.core.windows.net/c?sv=1&sig=hush-hush", "layers": (1, 2)}},
        {"params": {"clientSecret": "hush-hush"}, "args": ("--pwd=hush-hush",)},
        {"script": "train.py", "args": ("--lr", "0.1", "--password", "hush-hush")},
    ],
)
def test_params_and_arguments_that_hold_secrets_are_sealed(fields: dict[str, Any], env: dict[str, str]) -> None:
    worker = WorkerKey()
    spec = make_spec(env=env, **fields)
    assert has_secrets(spec)
    sealed = encrypt_spec(spec, worker.public)
    assert "hush-hush" not in sealed.to_json()
    assert list(sealed.env) == [SEALED]
    opened = decrypt_spec(RankSpec.from_json(sealed.to_json()), worker)
    assert json.loads(opened.to_json()) == json.loads(spec.to_json())
    with pytest.raises(ClusterError, match="not sealed for this worker"):
        decrypt_spec(sealed, WorkerKey())


def test_order_without_secrets_is_not_sealed() -> None:
    spec = make_spec(tracking=TrackingSpec((TrackerSpec("a:B", {"every": 3, "token": True, "key": ""}),)))
    assert not has_secrets(spec)
    assert decrypt_spec(spec, WorkerKey()) == spec


def test_empty_environment_costs_nothing_and_an_open_one_is_taken_as_it_is() -> None:
    assert seal({}, "", "a") == {}
    assert WorkerKey().open(ENV, "a") == ENV
