"""Whether trackers can be had, as far as the driver can tell before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from ddptrain.config.models import RunConfig
from ddptrain.config.registry import TRACKER_PACKAGES, TRACKERS
from ddptrain.errors import UsageError


def check_trackers(config: RunConfig) -> None:
    """Raise UsageError where ranks will run with this Python, and the package of a tracker is not installed for it.

    Ranks on other clusters warn of it, and go on without that tracker.
    """
    if not config.cluster.is_embedded:
        return
    for tracker in config.tracking.for_rank(0):
        name = tracker.name
        if name in TRACKERS and find_spec(name) is None:
            raise UsageError(
                f"tracking.{name} is on, but the package {name} is not installed: pip install "
                f"'{TRACKER_PACKAGES[name]}', or turn it off with --set tracking.{name}.mode=off"
            )
