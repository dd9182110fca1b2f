"""Sets up the trackers of a run: W&B ids that stay the same over attempts, and whether W&B is reachable."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.tracking import TRACKERS, install_tracker
from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.protocol.rank_spec import TrackingSpec
from ddptrain.redact import hide_credentials
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint
from ddptrain.results.layout import WANDB
from ddptrain.results.run_writer import RunWriter
from ddptrain.tracking.wandb_files import BASE_URL, KEY, find_access

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace

_OFFLINE = frozenset({"offline", "dryrun"})
_WANDB_MODES = _OFFLINE | {"", "online", "run", "shared"}
# Variables about the driver's own process and file system, which are not passed to ranks on other hosts.
_DRIVER_ONLY = frozenset({"WANDB_SERVICE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", KEY})


def check_trackers(config: RunConfig) -> None:
    """Raise UsageError if the package of a tracker is not installed, for a cluster on this machine.

    On other clusters the rank prints a warning, and runs without the tracker.
    """
    if not config.cluster.is_embedded:
        return
    for name in (tracker.name for tracker in config.tracking.for_rank(0)):
        if name in TRACKERS.built_in and find_spec(name) is None:
            raise UsageError(
                f"tracking.{name} is on, but the package {name} is not installed: "
                f"{install_tracker(name)}, or turn it off with --set tracking.{name}.mode=off"
            )


class TrackingSetup:
    """The trackers of a run's ranks. `env` holds the variables that they need, including the W&B API key."""

    def __init__(
        self, resolved: ResolvedConfig, writer: RunWriter, environ: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        config = resolved.config
        self._config, self._writer, self._tell = config.tracking, writer, tell
        self._name = config.name
        self.env: dict[str, str] = {}
        self._wandb: dict[str, Any] = {}
        self._resumed_from: int | None = None
        if not self._config.is_on:
            return
        self._public_config = resolved.recorded
        if self._config.wandb.mode != "off":
            self._set_up_wandb({**environ, **config.env}, embedded=config.cluster.is_embedded)

    def go_on_from(self, checkpoint: VerifiedCheckpoint | None) -> None:
        """Set where the next attempt continues."""
        self._resumed_from = checkpoint.step if checkpoint else None

    def of(self, place: RankPlace) -> TrackingSpec | None:
        """Return the field `tracking` of the rank spec for a place; None if the rank has no tracker."""
        chosen = [each for each in self._config.for_rank(place.rank) if each.name != WANDB or self._wandb]
        if not chosen:
            return None
        from_driver = {WANDB: self._wandb}
        return TrackingSpec(
            trackers=tuple(dataclasses.replace(each, from_driver=from_driver.get(each.name, {})) for each in chosen),
            name=self._name,
            config=self._public_config,
            resumed_from=self._resumed_from,
            folder=str(self._writer.layout.tracking_dir) if place.shared else "",
        )

    def _set_up_wandb(self, environ: Mapping[str, str], *, embedded: bool) -> None:
        access = find_access(environ)
        variable = (environ.get("WANDB_MODE") or access.mode or "").lower()
        if variable == "disabled":
            self._tell("W&B is off: WANDB_MODE is disabled")
            return
        if variable not in _WANDB_MODES:
            self._tell(f'WANDB_MODE is "{shorten(variable)}", which W&B does not know; use online, offline or disabled')
        mode = "shared" if variable == "shared" else str(self._config.wandb.mode)
        online = variable not in _OFFLINE and access.has_credentials
        if not online:
            why = f"WANDB_MODE is {variable}" if variable in _OFFLINE else "no API key in WANDB_API_KEY or ~/.netrc"
            apart = ", one run for each rank, because ranks can share a run only online" if mode == "shared" else ""
            mode = "process" if mode == "shared" else mode
            self._tell(f"W&B records offline ({why}){apart}; `{self._sync_command}` sends it later")
        if not embedded:
            names = {name for name in environ if name.startswith("WANDB_")} - _DRIVER_ONLY
            self.env |= {name: environ[name] for name in names}
        self.env |= {name: value for name, value in ((KEY, access.key), (BASE_URL, access.base_url)) if value}
        self._wandb = {
            "mode": mode,
            "online": online,
            "id": self._wandb_id(online, access.base_url),
            "sync_command": self._sync_command,
        }

    @property
    def _sync_command(self) -> str:
        return f"ddptrain results sync {self._writer.layout.argument}"

    def _wandb_id(self, online: bool, base_url: str) -> str:
        """Return the id of the W&B run: created once, recorded in run.json, and kept when the run is resumed."""
        record = self._writer.record.tracking
        known = {"id": secrets.token_hex(4), **record.get(WANDB, {}), "mode": "online" if online else "offline"}
        if base_url:
            known["base_url"] = hide_credentials(base_url)
        self._writer.update(tracking={**record, WANDB: known})
        return known["id"]
