"""How the ranks of a shared run learn whether rank 0 has opened it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import tracker
from ddptrain.tracking.wandb.tracker import RankRun, SharedRunSignal
from ddptrain.tracking.wandb.wandb_run import RunOptions


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Where the store of a worker group is."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    del store


@pytest.mark.parametrize(("is_open", "problem"), [(True, ""), (False, "rank 0 has opened no W&B run online")])
def test_other_ranks_hear_what_rank_0_has_done(environ: dict[str, str], is_open: bool, problem: str) -> None:
    SharedRunSignal(2, environ).send(is_open=is_open)
    assert SharedRunSignal(2, environ).wait(60.0) == problem


def test_signal_of_an_earlier_attempt_does_not_count(environ: dict[str, str]) -> None:
    SharedRunSignal(1, environ).send(is_open=True)
    assert SharedRunSignal(2, environ).wait(0.2) == "rank 0 has not opened the W&B run within 0.2 s"


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "none"}])
def test_missing_store_raises_nothing(environ: dict[str, str]) -> None:
    SharedRunSignal(1, environ).send(is_open=True)
    assert "has not opened" in SharedRunSignal(1, environ).wait(0.1)


class Opened:
    """Stands for wandb: opens every run, except for online ones if `fails`."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails = fails
        self.modes: list[tuple[str, str]] = []

    def __call__(self, options: RunOptions) -> Any:
        self.modes.append((options.mode, options.run_id))
        if self.fails is not None and options.mode != "offline":
            raise self.fails
        return self


def opened_by(made: RankRun) -> tuple[object, str]:
    return made.open()


def of_rank(rank: int, folder: Path, environ: dict[str, str], mode: str = "shared") -> RankRun:
    told = {"mode": mode, "online": True, "id": "w1"}
    return RankRun(
        {},
        Facts("r-1", "r", 1, rank, 2, rank, 0, 1, folder, from_driver=told),
        {**environ, "WANDB_INIT_TIMEOUT": "0.1"},
    )


@pytest.mark.parametrize("error", [RuntimeError("refused"), SystemExit(1)])
def test_all_ranks_record_offline_in_runs_of_their_own_if_rank_0_cannot_open_the_run(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    opened = Opened(error)
    monkeypatch.setattr(tracker, "open_run", opened)
    first, second = of_rank(0, tmp_path, environ), of_rank(1, tmp_path, environ)
    assert opened_by(first) == (opened, f"W&B has opened no run online ({error})")
    assert opened_by(second) == (opened, "rank 0 has opened no W&B run online")
    assert (first.mode, second.mode, second.prefix) == ("process", "process", "")
    assert opened.modes == [("shared", "w1"), ("offline", "w1"), ("offline", "w1-1")]


def test_rank_that_hears_nothing_records_offline(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "open_run", Opened())
    monkeypatch.setattr(tracker, "_EXTRA_WAIT_S", 0.1)
    _, problem = of_rank(1, tmp_path, environ).open()
    assert problem == "rank 0 has not opened the W&B run within 0.2 s"
