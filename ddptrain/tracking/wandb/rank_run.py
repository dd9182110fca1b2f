"""The W&B run that one rank logs into: its id, name and settings, and what happens if the server is unreachable."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import wandb

from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb.wandb_run import RunOptions, open_run, reason_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_FINISH_SHARE = 0.8  # wandb's share of the time for the end; the rest is for queued items and messages
_EXTRA_WAIT_S = 15.0  # added to rank 0's time for opening the run, because rank 0 may start later than other ranks
_OPEN, _NOT_OPEN = "open", "not open"


class RankRun:
    """Chooses and opens the run, from the options, what the driver adds (`facts.from_driver`) and the environment.

    Environment variables have priority. `mode` is rank0, process or shared; offline, shared becomes process.
    """

    def __init__(self, options: Mapping[str, Any], facts: Facts, environ: Mapping[str, str]) -> None:
        self._options, self._facts = options, facts
        self._environ = environ
        self.mode = str(facts.from_driver.get("mode") or options.get("mode") or "rank0")
        self.online = bool(facts.from_driver.get("online"))
        self.folder = facts.folder / "wandb"
        self.finish_timeout_s = float(options.get("finish_timeout_s", 30.0))
        self.wandb_timeout_s = _FINISH_SHARE * self.finish_timeout_s
        self._init_timeout_s = float(environ.get("WANDB_INIT_TIMEOUT") or 20.0)
        self._base_id = environ.get("WANDB_RUN_ID") or str(facts.from_driver.get("id") or facts.run_id)

    @property
    def prefix(self) -> str:
        """The prefix of the names of metrics if ranks share a run, else ""."""
        return f"rank_{self._facts.rank}/" if self.mode == "shared" else ""

    def open(self) -> tuple[wandb.Run, str]:
        """Open the run. Raises any exception of wandb.

        Also return why the run is offline although online was wanted, or "".
        """
        problem = ""
        if self.online:
            run, problem = self._open_online()
            if run is not None:
                return run, ""
        if self.mode == "shared":
            self.mode = "process"
        return open_run(self.run_options("offline")), problem

    def _open_online(self) -> tuple[wandb.Run | None, str]:
        """Return the run and "", or None and the reason."""
        is_shared = self.mode == "shared" and self._facts.world_size > 1
        signal = SharedRunSignal(self._facts.attempt, self._environ) if is_shared else None
        is_primary = self._facts.rank == 0
        if signal and not is_primary and (problem := signal.wait(self._init_timeout_s + _EXTRA_WAIT_S)):
            return None, problem
        run, problem = None, ""
        try:
            run = open_run(self.run_options("shared" if self.mode == "shared" else "online"))
        except (Exception, SystemExit) as error:  # SystemExit: wandb may exit with its service's exit code
            problem = f"W&B has opened no run online ({reason_of(error)})"
        if signal and is_primary:
            signal.send(is_open=run is not None)  # a rank that cannot receive it records offline
        return run, problem

    def run_options(self, mode: str) -> RunOptions:
        """Return the options for opening the run "online", "shared" or "offline"."""
        config = None if mode == "shared" and self._facts.rank else self._config()
        is_own = self._facts.rank and mode != "shared"
        run_id = f"{self._base_id}-{self._facts.rank}" if is_own else self._base_id
        timeouts = self._init_timeout_s, self.wandb_timeout_s
        return RunOptions(mode, run_id, self.folder, config, *timeouts, settings=self._settings(mode))

    def _config(self) -> dict[str, Any]:
        """Return the configuration without secrets, and where the rank runs."""
        facts = self._facts
        placement = {name: getattr(facts, name) for name in ("run_id", "attempt", "world_size", "hosts", "rank")}
        return {**facts.config, **placement}

    def _settings(self, mode: str) -> dict[str, Any]:
        options, facts = self._options, self._facts
        settings = {
            "project": options.get("project") or facts.name,
            "entity": options.get("entity"),
            "run_name": self._name(mode),
            "run_group": facts.run_id if self._is_one_of_many(mode) else None,
            "x_disable_stats": facts.local_rank != 0,
        }
        if mode != "shared":
            return settings
        # Without the suffix, folders of ranks that open their runs in the same second would have the same name.
        label = f"rank_{facts.rank}"
        settings |= {"x_label": label, "x_primary": facts.rank == 0, "x_sync_dir_suffix": label}
        if facts.rank:  # rank 0 names and finishes the run
            settings |= {"x_update_finish_state": False, "run_name": None, "run_notes": None}
        return settings

    def _is_one_of_many(self, mode: str) -> bool:
        return self.mode == "process" or (self.mode == "shared" and mode == "offline")

    def _name(self, mode: str) -> str | None:
        chosen = self._environ.get("WANDB_NAME")
        if not self._is_one_of_many(mode):
            return chosen or self._facts.run_id
        rank = f"rank_{self._facts.rank}"
        return f"{chosen}-{rank}" if chosen else rank


class SharedRunSignal:
    """In mode `shared`, tells the other ranks through the worker group's TCPStore whether rank 0 has opened the run.

    Waiting for a key in the store is not a collective: it has a timeout, and delays no other rank. No method raises.
    """

    def __init__(self, attempt: int, environ: Mapping[str, str] = os.environ) -> None:
        self._key = f"ddptrain/{attempt}/tracking/wandb"
        self._environ = environ

    def _store(self, timeout_s: float) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = self._environ["MASTER_ADDR"], int(self._environ["MASTER_PORT"])
        timeout = dt.timedelta(seconds=timeout_s)
        return TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)

    def send(self, *, is_open: bool) -> None:
        """Tell the other ranks, from rank 0. Errors are ignored: without the store, no rank is waiting any more."""
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            self._store(10.0).set(self._key, _OPEN if is_open else _NOT_OPEN)

    def wait(self, timeout_s: float) -> str:
        """Wait for rank 0. Return why the run is not open, or ""."""
        try:
            state = self._store(timeout_s).get(self._key).decode()
        except (RuntimeError, KeyError, ValueError):
            return f"rank 0 has not opened the W&B run within {timeout_s:g} s"
        return "" if state == _OPEN else "rank 0 has opened no W&B run online"
