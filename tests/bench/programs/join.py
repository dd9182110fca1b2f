"""Ranks that join their process group and leave it again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def workload(ctx: Any, folder: str) -> None:
    """Record when the rank has joined."""
    Path(folder, f"step-{ctx.rank}").write_text(str(time.time_ns()))
