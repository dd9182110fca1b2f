"""For which reasons a test may be skipped where DDPTRAIN_STRICT_SKIPS is set: `.ci/run`, the workflows on GitHub.

All servers are installed there, so a test that is skipped for any other reason fails the run.
"""

from __future__ import annotations

import os
import re

# Hardware, data and systems that no machine for tests has, or not each.
ANYWHERE = (
    "no NVIDIA GPU",
    "Seattle names are not at",
    "no control group can be made",  # control groups of version 2 in a container cannot be written
    "the system's Python has ddptrain",
    "groff is not installed",
)
AS_ROOT = ("root may read everything",)
# The job `root` of the nightly workflow has these.
WITHOUT_ROOT = (
    "only root can",
    "needs root",  # mount namespaces, a disk of its own, Slurm
    "namespaces need Linux, and root",
    "cron is not installed, or this user can't start it",
)


def forbidden(reasons: set[str]) -> list[str]:
    """Those for which no test may be skipped here."""
    allowed = (*ANYWHERE, *(AS_ROOT if os.geteuid() == 0 else WITHOUT_ROOT))
    return sorted(reason for reason in reasons if not re.search("|".join(map(re.escape, allowed)), reason))
