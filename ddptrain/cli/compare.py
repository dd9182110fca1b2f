"""`ddptrain results compare`: what differs between runs, their metrics and curves."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddptrain.results.show.chart import Style


def chart_style() -> Style:
    """What the terminal can show."""
    import shutil

    from ddptrain.results.show.chart import Style

    is_terminal = sys.stdout.isatty()
    can_show = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    size = shutil.get_terminal_size()
    return Style(
        width=size.columns if is_terminal else 80,
        height=min(20, max(8, size.lines - 10)) if is_terminal else 16,
        unicode=is_terminal and can_show,
        colour=is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )
