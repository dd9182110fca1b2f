"""Shows the logs of a run: whole lines, as a terminal would show them; follows them while the run is running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ddptrain.errors import RunNotFound
from ddptrain.results.layout import RunLayout
from ddptrain.results.log_tail import LogTail
from ddptrain.results.lookup import RunView, load_run

_POLL_S = 0.1
_STATUS_EVERY_S = 0.5


def final_text(line: str) -> str:
    """Return the line as a terminal shows it after its carriage returns."""
    shown = ""
    for part in line.split("\r"):
        # Progress bars that use escape codes clear the rest of the line.
        shown = part if "\x1b" in part else part + shown[len(part) :]
    return shown


def show_logs(view: RunView, rank: int | None = None, lines: int | None = None) -> Iterator[str]:
    """Yield the lines of every rank, or of one; only the last `lines` of each, if given. Several ranks have a prefix.

    Raises RunNotFound if the run has no log of that rank.
    """
    return follow_logs(view, rank, lines, is_running=lambda: False)


def follow_logs(
    view: RunView,
    rank: int | None = None,
    lines: int | None = None,
    *,
    is_running: Callable[[], bool] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Like show_logs(), then yield each new line until the run has ended.

    Raises RunNotFound if the run has ended and has no log of that rank.
    """
    layout = view.layout
    still_running = is_running or _status_of(layout)
    several = max(view.record.world_size, len(layout.logs())) > 1
    prefixed = rank is None and (several or view.record.world_size == 0)  # 0: not known before the ranks start
    tails: dict[int, LogTail] = {}
    running = True
    while running:
        running = still_running()  # before the last read: all that was printed before the end is then read
        for number, path in layout.logs().items():
            if rank in (None, number):
                # `lines` applies to logs that exist at the start; all lines of a later one are new.
                tails.setdefault(number, LogTail(path, lines))
        lines = None
        for number, tail in tails.items():
            prefix = f"[rank {number}] " if prefixed else ""
            yield from (prefix + text for text in tail.texts())
            if not running:
                yield from (prefix + line.text for line in tail.rest())
        if running:
            wait(_POLL_S)
    if rank is not None and not tails:
        numbers = ", ".join(map(str, layout.logs()))
        has = f"it has logs of ranks {numbers}" if numbers else "it has no logs"
        raise RunNotFound(f"run {view.run_id} has no log of rank {rank}; {has}")


def _status_of(layout: RunLayout) -> Callable[[], bool]:
    """Return a function that says whether the run is running, without reading run.json at every poll."""
    asked_at, running = float("-inf"), True

    def is_running() -> bool:
        nonlocal asked_at, running
        if time.monotonic() - asked_at >= _STATUS_EVERY_S:
            running = load_run(layout.root).is_running
            asked_at = time.monotonic()
        return running

    return is_running
