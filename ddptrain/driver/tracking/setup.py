"""What ranks are told for their trackers: ids that stay the same over attempts, and whether W&B can be reached."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ddptrain.config.load import resolved_config, without_secrets
from ddptrain.config.models import RunConfig
from ddptrain.driver.tracking.wandb_credentials import BASE_URL, KEY, find_access
from ddptrain.driver.worker_group import Place
from ddptrain.protocol.rank_spec import TrackingSpec
from ddptrain.redact import hide_credentials
from ddptrain.results.checkpoint_verification import VerifiedCheckpoint
from ddptrain.results.metrics import AllSeries
from ddptrain.results.tracking.record import to_type
from ddptrain.results.writer import RunWriter

WANDB = "wandb"
_OFFLINE = frozenset({"offline", "dryrun"})
# Of the driver's own process and file system: not for ranks on other hosts.
_OWN = frozenset({"WANDB_SERVICE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", KEY})


class Tracking:
    """The trackers of a run's ranks; `env` is what they need in their environment, the key of W&B among it."""

    def __init__(
        self, config: RunConfig, writer: RunWriter, environ: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._config, self._writer, self._tell = config.tracking, writer, tell
        self._name = config.name
        self.env: dict[str, str] = {}
        self._wandb: dict[str, Any] = {}
        self._resumed_from: int | None = None
        self._series: AllSeries = {}
        if not self._config.is_on:
            return
        self._facts = without_secrets(resolved_config(config)).model_dump(mode="json")
        if self._config.wandb.mode != "off":
            self._look_at_wandb({**environ, **config.env}, embedded=config.cluster.is_embedded)

    def __repr__(self) -> str:
        return f"Tracking({self._name!r}, wandb={self._wandb})"

    def go_on_from(self, checkpoint: VerifiedCheckpoint | None, series: AllSeries) -> None:
        """The next attempt goes on from there; `series` are the metrics up to there."""
        self._resumed_from = checkpoint.step if checkpoint else None
        self._series = series

    def of(self, place: Place) -> TrackingSpec | None:
        """Return RankSpec.tracking of the rank at a place, or None if it has no tracker."""
        chosen = [each for each in self._config.for_rank(place.rank) if each.name != WANDB or self._wandb]
        if not chosen:
            return None
        told = {WANDB: {**self._wandb, "before": before(self._series, place.rank)}}
        return TrackingSpec(
            trackers=tuple(dataclasses.replace(each, told=told.get(each.name, {})) for each in chosen),
            name=self._name,
            strict=self._config.strict,
            queue=self._config.queue,
            config=self._facts,
            resumed_from=self._resumed_from,
            folder=str(self._writer.layout.tracking_dir) if place.shared else "",
        )

    def _look_at_wandb(self, environ: Mapping[str, str], *, embedded: bool) -> None:
        access = find_access(environ)
        wish = (environ.get("WANDB_MODE") or access.mode or "").lower()
        mode = "shared" if wish == "shared" else str(self._config.wandb.mode)
        if wish == "disabled":
            self._tell("W&B is off: WANDB_MODE is disabled")
            return
        online = wish not in _OFFLINE and access.is_there
        if not online:
            why = f"WANDB_MODE is {wish}" if wish in _OFFLINE else "no API key in WANDB_API_KEY or ~/.netrc"
            apart = ", a run a rank, for ranks share one online only" if mode == "shared" else ""
            mode = "process" if mode == "shared" else mode
            later = f"`ddptrain results sync {to_type(self._writer.layout)}` sends it later"
            self._tell(f"W&B records offline ({why}){apart}; {later}")
        if not embedded:
            self.env |= {name: value for name, value in environ.items() if _goes_along(name)}
        if access.key:
            self.env[KEY] = access.key
        if access.base_url:
            self.env[BASE_URL] = access.base_url
        self._wandb = {
            "mode": mode,
            "online": online,
            "id": self._id(online, access.base_url),
            "to_type": to_type(self._writer.layout),
            "strict": self._config.strict,
        }

    def _id(self, online: bool, base_url: str) -> str:
        """The id of the run in W&B: made once, however often it is resumed."""
        record = self._writer.record.tracking
        known = {"id": secrets.token_hex(4), **record.get(WANDB, {}), "mode": "online" if online else "offline"}
        if base_url:
            known["base_url"] = hide_credentials(base_url)
        self._writer.update(tracking={**record, WANDB: known})
        return known["id"]


def before(series: AllSeries, rank: int) -> dict[str, tuple[float, float, float]]:
    """The lowest, the highest and the last value of each metric of a rank."""
    finite = {name: list(filter(math.isfinite, one.value)) for (name, of), one in series.items() if of == rank}
    return {name: (min(values), max(values), values[-1]) for name, values in finite.items() if values}


def _goes_along(name: str) -> bool:
    return name.startswith("WANDB_") and name not in _OWN
