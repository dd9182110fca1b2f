"""Shows the logs of a run: whole lines, as a terminal would show them; follows them while the run is running."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from ddptrain.errors import RunNotFound
from ddptrain.results.log_tail import LogLine, LogTail
from ddptrain.results.run import Run

_POLL_S = 0.1


def final_text(line: str) -> str:
    """Return the line as a terminal shows it after its carriage returns."""
    shown = ""
    for part in line.split("\r"):
        # Progress bars that use escape codes clear the rest of the line.
        shown = part if "\x1b" in part else part + shown[len(part) :]
    return shown


def show_logs(view: Run, rank: int | None = None, lines: int | None = None, *, as_json: bool = False) -> Iterator[str]:
    """Yield the lines of every rank, or of one; only the last `lines` of each, if given. Several ranks have a prefix.

    as_json: each line is the event `log`, as with --output json.

    Raises RunNotFound if the run has no log of that rank.
    """
    return _logs(lambda: view, rank, lines, lambda run: False, time.sleep, as_json)


def follow_logs(
    view: Run,
    rank: int | None = None,
    lines: int | None = None,
    *,
    wait: Callable[[float], None] = time.sleep,
    settling: Callable[[Callable[[], Run]], Callable[[], Run]] = lambda look: look,
    as_json: bool = False,
) -> Iterator[str]:
    """Like show_logs(), then yield each new line until the run has ended.

    settling: see driver/submit.py: a run whose job was cancelled has ended.

    Raises RunNotFound if the run has ended and has no log of that rank.
    """
    look = view.follow("logs/rank-*.log" if rank is None else f"logs/rank-{rank}.log")
    return _logs(settling(look), rank, lines, lambda run: run.goes_on, wait, as_json)


def _logs(
    look: Callable[[], Run],
    rank: int | None,
    lines: int | None,
    goes_on: Callable[[Run], bool],
    wait: Callable[[float], None],
    as_json: bool,
) -> Iterator[str]:
    def shown(number: int, line: LogLine) -> str:
        if as_json:
            partial = {} if line.ended else {"partial": True}
            return json.dumps({"event": "log", "rank": number, "line": line.text, **partial})
        return f"[rank {number}] {line.text}" if prefixed else line.text

    tails: dict[int, LogTail] = {}
    running, prefixed = True, False
    while running:
        run = look()
        running = goes_on(run)  # before the last read: all that was printed before the end is then read
        if lines is not None or not tails:
            world_size = run.record.world_size  # 0: not known before the ranks start
            prefixed = rank is None and (max(world_size, len(run.logs())) > 1 or world_size == 0)
        for number in run.logs():
            if rank in (None, number):
                # `lines` applies to logs that exist at the start; all lines of a later one are new.
                tails.setdefault(number, LogTail(run.log(number), lines))
        lines = None
        for number, tail in tails.items():
            yield from (shown(number, line) for line in tail.lines())
            if not running:
                yield from (shown(number, line) for line in tail.rest())
        if running:
            wait(_POLL_S)
    if rank is not None and not tails:
        numbers = ", ".join(map(str, run.logs()))
        has = f"it has logs of ranks {numbers}" if numbers else "it has no logs"
        raise RunNotFound(f"run {run.run_id} has no log of rank {rank}; {has}")
