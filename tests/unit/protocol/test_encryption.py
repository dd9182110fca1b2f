"""What is sealed for a worker is read by that worker alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ddptrain.errors import ClusterError
from ddptrain.protocol.encryption import SEALED, WorkerKey, decrypt_specs, encrypt_specs, has_secrets, seal
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
        with pytest.raises(ClusterError, match="not encrypted for this worker"):
            opener.open(sealed, purpose)
    with pytest.raises(ClusterError, match="not encrypted for this worker"):
        worker.open({SEALED: "AAAA"}, "run/1/0")


OWN = {"login": {"password": ["hush-hush"]}, "url": "http://me:hush-hush@there", "every": 3}


@pytest.mark.parametrize("env", [{}, ENV])
def test_options_of_trackers_that_hold_secrets_are_sealed_with_the_environment(env: dict[str, str]) -> None:
    worker = WorkerKey()
    tracking = TrackingSpec((TrackerSpec("a:B", OWN),), strict=True)
    spec = make_spec(env=env, tracking=tracking)
    assert "hush-hush" not in repr(spec)
    assert has_secrets(spec)
    (sealed,) = encrypt_specs([spec], [worker.public])
    assert "hush-hush" not in sealed.to_json()
    assert sealed.tracking is not None and sealed.tracking.trackers[0].options["every"] == 3
    assert decrypt_specs([sealed], worker) == [spec]


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
    (sealed,) = encrypt_specs([spec], [worker.public])
    assert "hush-hush" not in sealed.to_json()
    assert list(sealed.env) == [SEALED]
    (opened,) = decrypt_specs([RankSpec.from_json(sealed.to_json())], worker)
    assert json.loads(opened.to_json()) == json.loads(spec.to_json())
    with pytest.raises(ClusterError, match="not encrypted for this worker"):
        decrypt_specs([sealed], WorkerKey())


def test_ranks_of_a_worker_share_one_message_and_each_gets_its_own_parts() -> None:
    workers = [WorkerKey(), WorkerKey()]
    tracking = TrackingSpec((TrackerSpec("a:B", OWN),))
    specs = [make_spec(rank=rank, env=ENV, tracking=tracking if rank == 0 else None) for rank in range(6)]
    sealed = encrypt_specs(specs, [workers[rank // 3].public for rank in range(6)])
    texts = [spec.env[SEALED] for spec in sealed]
    assert texts[1] == texts[2] and texts[3] == texts[4] == texts[5]
    assert len(set(texts)) == 3  # rank 0 has more to hide, and each worker has a key of its own
    for number, worker in enumerate(workers):
        part = slice(3 * number, 3 * number + 3)
        opened = decrypt_specs(sealed[part], worker)
        assert opened == specs[part]
        assert len({id(spec.env) for spec in opened}) == 3
    with pytest.raises(ClusterError, match="not encrypted for this worker"):
        decrypt_specs(sealed, workers[0])


def test_message_of_an_earlier_attempt_is_refused() -> None:
    worker = WorkerKey()
    (sealed,) = encrypt_specs([make_spec(env=ENV)], [worker.public])
    with pytest.raises(ClusterError, match="not encrypted for this worker"):
        decrypt_specs([dataclasses.replace(sealed, attempt=sealed.attempt + 1)], worker)


def test_order_without_secrets_is_not_sealed() -> None:
    spec = make_spec(tracking=TrackingSpec((TrackerSpec("a:B", {"every": 3, "token": True, "key": ""}),)))
    assert not has_secrets(spec)
    assert decrypt_specs([spec], WorkerKey()) == [spec]


def test_empty_environment_costs_nothing_and_an_open_one_is_taken_as_it_is() -> None:
    assert seal({}, "", "a") == {}
    assert WorkerKey().open(ENV, "a") == ENV
