"""How the ranks of a shared run learn whether rank 0 has opened it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb_run import RankRun, signal_from_rank_0, wait_for_rank_0


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Where the store of a worker group is."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    del store


@pytest.mark.parametrize(("is_open", "problem"), [(True, ""), (False, "rank 0 has opened no W&B run online")])
def test_other_ranks_hear_what_rank_0_has_done(environ: dict[str, str], is_open: bool, problem: str) -> None:
    signal_from_rank_0(2, environ, is_open=is_open)
    assert wait_for_rank_0(2, environ, 60.0) == problem


def test_signal_of_an_earlier_attempt_does_not_count(environ: dict[str, str]) -> None:
    signal_from_rank_0(1, environ, is_open=True)
    assert wait_for_rank_0(2, environ, 0.2) == "rank 0 has not opened the W&B run within 0.2 s"


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "none"}])
def test_missing_store_raises_nothing(environ: dict[str, str]) -> None:
    signal_from_rank_0(1, environ, is_open=True)
    assert "has not opened" in wait_for_rank_0(1, environ, 0.1)


def of_rank(rank: int, folder: Path, environ: dict[str, str], mode: str = "shared") -> RankRun:
    facts = Facts("r-1", "r", 1, rank, 2, rank, 0, 1, folder, from_driver={"mode": mode, "online": True, "id": "w1"})
    return RankRun({}, facts, {**environ, "WANDB_INIT_TIMEOUT": "0.1"})


@pytest.mark.parametrize("error", [RuntimeError("refused"), SystemExit(1)])
def test_all_ranks_record_offline_in_runs_of_their_own_if_rank_0_cannot_open_the_run(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    opened: list[tuple[str, str]] = []

    def init(settings: wandb.Settings, **_: object) -> Any:
        opened.append((settings.mode, str(settings.run_id)))
        if settings.mode != "offline":
            raise error
        return SimpleNamespace(offline=True)

    for name in ("DATA_DIR", "CACHE_DIR", "SILENT", "ERROR_REPORTING"):
        monkeypatch.setenv(f"WANDB_{name}", "true")
    monkeypatch.setattr(wandb, "init", init)
    first, second = of_rank(0, tmp_path, environ), of_rank(1, tmp_path, environ)
    assert first.open()[1] == f"W&B has opened no run online ({error})"
    assert second.open()[1] == "rank 0 has opened no W&B run online"
    assert (first.mode, second.mode, second.prefix) == ("process", "process", "")
    assert opened == [("shared", "w1"), ("offline", "w1"), ("offline", "w1-1")]
