"""How a rank takes part in W&B: into which run it logs, under which name, and what it does where the server is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import run as wandb_run
from ddptrain.tracking.wandb.rendezvous import Meeting
from ddptrain.tracking.wandb.run import Wanted
from ddptrain.tracking.wandb.uploads import Uploads

_FINISH_SHARE = 0.8  # of the time for the end is wandb's: the rest is for what waits, and for a word about it
_GRACE_S = 15.0  # beyond the time that rank 0 has to open the run: it may begin later than the others


class Plan:
    """Made from the options, from what the driver tells (`mode`, `online`, `id`) and from the environment, which wins.

    `mode` is rank0, process or shared; without the server, shared becomes process.
    """

    def __init__(self, options: Mapping[str, Any], facts: Facts, environ: Mapping[str, str]) -> None:
        self._options, self._facts = options, facts
        self._environ = environ
        self.mode = str(facts.told.get("mode") or options.get("mode") or "rank0")
        self.online = bool(facts.told.get("online"))
        self.folder = facts.folder / "wandb"
        self.uploads = Uploads()
        self.finish_timeout_s = float(options.get("finish_timeout_s", 30.0))
        self.wandb_timeout_s = _FINISH_SHARE * self.finish_timeout_s
        self._init_timeout_s = float(options.get("init_timeout_s", 20.0))
        self._base_id = environ.get("WANDB_RUN_ID") or str(facts.told.get("id") or facts.run_id)

    @property
    def prefix(self) -> str:
        """What stands before the names of metrics: ranks that share a run tell theirs apart."""
        return f"rank_{self._facts.rank}/" if self.mode == "shared" else ""

    def open(self) -> tuple[wandb.Run, str]:
        """The run, and why it is not online although it was to be, or "". Raises what wandb raises offline."""
        trouble = ""
        if self.online:
            run, trouble = self._open_online()
            if run is not None:
                return run, ""
        if self.mode == "shared":
            self.mode = "process"
        return wandb_run.open_run(self._wanted("offline"), self.uploads), trouble

    def _open_online(self) -> tuple[wandb.Run | None, str]:
        meeting = Meeting(self._facts.attempt, self._environ) if self._meets else None
        primary = self._facts.rank == 0
        if meeting is not None and not primary and (problem := meeting.wait(self._init_timeout_s + _GRACE_S)):
            return None, problem
        run, trouble, wish = None, "", "shared" if self.mode == "shared" else "online"
        try:
            run = wandb_run.open_run(self._wanted(wish), self.uploads)
        except (Exception, SystemExit) as error:  # wandb may leave with the exit code of its own process
            trouble = f"W&B has opened no run online ({wandb_run.reason_of(error)})"
        if meeting is not None and primary:
            meeting.tell(is_open=run is not None)  # who does not hear of it goes on offline
        return run, trouble

    @property
    def _meets(self) -> bool:
        return self.mode == "shared" and self._facts.world_size > 1

    def _wanted(self, mode: str) -> Wanted:
        config = None if mode == "shared" and self._facts.rank else self._config()
        own = self._facts.rank and mode != "shared"
        run_id = f"{self._base_id}-{self._facts.rank}" if own else self._base_id
        timeouts = self._init_timeout_s, self.wandb_timeout_s
        return Wanted(mode, run_id, self.folder, config, *timeouts, more=self._settings(mode))

    def _config(self) -> dict[str, Any]:
        """The configuration without secrets, and the facts of the cluster."""
        facts = self._facts
        return {
            **facts.config,
            "run_id": facts.run_id,
            "attempt": facts.attempt,
            "world_size": facts.world_size,
            "hosts": facts.hosts,
            "rank": facts.rank,
        }

    def _settings(self, mode: str) -> dict[str, Any]:
        options, facts = self._options, self._facts
        settings = {
            "project": options.get("project") or facts.name,
            "entity": options.get("entity"),
            "run_name": self._name(mode),
            "run_notes": options.get("notes"),
            "run_tags": tuple(options.get("tags") or ()) or None,
            "run_group": options.get("group") or (facts.run_id if self._is_one_of_many(mode) else None),
            "x_disable_stats": not (options.get("system_metrics", True) and facts.local_rank == 0),
        }
        if mode != "shared":
            return settings
        # The folder's name has the rank, for ranks of one host begin in the same second.
        label = f"rank_{facts.rank}"
        settings |= {"x_label": label, "x_primary": facts.rank == 0, "x_sync_dir_suffix": label}
        if facts.rank:  # the run is named, and finished, by rank 0
            settings |= {"x_update_finish_state": False, "run_name": None, "run_notes": None, "run_tags": None}
        return settings

    def _is_one_of_many(self, mode: str) -> bool:
        return self.mode == "process" or (self.mode == "shared" and mode == "offline")

    def _name(self, mode: str) -> str | None:
        given = self._environ.get("WANDB_NAME") or self._options.get("name")
        if not self._is_one_of_many(mode):
            return given or self._facts.run_id
        rank = f"rank_{self._facts.rank}"
        return f"{given}-{rank}" if given else rank
