"""The live display: log lines, and below them a few rows that are redrawn.

Ranks in lockstep share one row; a rank that is behind or has failed has a row of its own. The last row says what
the run does and how far it is. rich makes the rows. Its import takes 0.1 s, so that it is imported when the first rank
has started (docs/adr, 8).
"""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted
from ddptrain.driver.display.facts import Pace, RunFacts, clock, eta_text, number
from ddptrain.driver.display.renderers import Renderer
from ddptrain.driver.display.terminal import (
    Stream,
    format_lines,
    format_own,
    harmless,
    notice,
    rank_style,
    terminal_size,
)
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.log_tail import LogLine
from ddptrain.results.system import SystemSummary
from ddptrain.text_tables import columns_of

if TYPE_CHECKING:
    from rich.console import RenderableType

BEHIND_S = 5.0  # a rank whose progress differs from that of the others by more than they do in this time has a row
COLUMNS = {"name": 0, "bar": 60, "percent": 0, "count": 100, "value": 40, "rate": 80, "eta": 20}  # least width to show
MIN_BAR, MAX_BAR, ROOM_BESIDE_BAR, GAP = 8, 40, 70, 2
WAIT_S = 1.0  # for the first rank; then the rows appear in any case
# Every rank counts the same ones: no sum over the ranks.
_SHARED_UNITS = {"step", "steps", "batch", "batches", "epoch", "epochs", "iteration", "iterations", "it"}
_CLEAR_ROW, _UP_AND_CLEAR_ROW = "\r\x1b[2K", "\x1b[1A\x1b[2K"
_NOTICE_STYLES = {"warning": "yellow", "error": "red"}
_STATE_STYLES = {"done": "green", "failed": "red"}

# Returns the rows of a sweep, for its status, the seconds since its start, and the rows of the terminal.
OtherRows = Callable[[str, float, int], Sequence[str]]


@dataclass
class _Rank:
    """What is known about one rank in this attempt."""

    rank: int
    host: str = ""
    state: str = "waiting"  # then running, done, stopped or failed
    value: tuple[str, float] | None = None  # the newest training loss, with its name
    redrawn: str = ""
    pace: Pace = field(default_factory=Pace)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.pace.done is not None or self.value or self.redrawn or self.state in ("failed", "stopped"))


class LiveRenderer(Renderer):
    """Draws on any terminal that can move its cursor up and clear a row.

    The cursor stays visible at the start of the row below the block, so that the terminal is usable even after a kill.
    Log lines and rows are written together, to avoid flicker.
    """

    redraw_every_s = 0.1

    def __init__(
        self,
        stdout: Stream,
        stderr: Stream,
        colour: bool,
        run_id: str,
        *,
        all_ranks: bool = False,
        rows: OtherRows | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """With `all_ranks` each rank has a row, as far as there is room. `elapsed_s`: since the run began."""
        super().__init__(stdout, stderr, colour)
        self._run_id, self._all_ranks, self._other = run_id, all_ranks, rows
        self._status = self._silence = ""
        self._ranks: dict[int, _Rank] = {}
        self._facts, self._use = RunFacts(), SystemSummary()
        self._dot = " · " if stdout.encoding.lower().startswith("utf") else " | "
        self._above: list[str] = []  # to be printed above the rows with the next frame
        self._drawn: tuple[str, tuple[int, int]] = "", (0, 0)  # the last frame, and the size of the terminal
        self._row_widths: list[int] = []  # of the last frame
        self._shown_from_s = time.monotonic() + WAIT_S
        self._started_s = time.monotonic() - elapsed_s

    # --- what happens ---

    def event(self, event: Mapping[str, Any]) -> None:
        """Update the rows; print a notice above them."""
        self._facts.event(event)
        rank = self._ranks.get(rank) if isinstance(rank := event.get("rank"), int) else None
        match event:
            case {"event": "notice", "message": str(text)}:
                self._print_above(notice(text), _NOTICE_STYLES.get(str(event.get("level")), ""))
            case {"event": "ranks", "count": count}:  # what is known of a rank stays until it starts again
                self._ranks = {rank: self._ranks.get(rank) or _Rank(rank) for rank in range(count)}
            case {"event": "numbers", "numbers": numbers} if rank is not None:
                for each in numbers:
                    self._number(rank, each)
            case {"event": "system", "sample": sample}:
                self._use.add(sample)
            case {"event": "silence", "message": str(text)}:
                self._silence = text
            case {"event": "status", "message": str(text)}:
                self._status = harmless(" ".join(text.split()))
            case {"event": "rank_started"} if rank is not None:
                self._ranks[rank.rank] = _Rank(rank.rank, harmless(str(event.get("host", ""))), "running")
                self._shown_from_s = 0.0
            case {"event": "rank_ended"} if rank is not None:
                rank.state = "done" if event.get("ok") is True else "stopped" if event.get("stopped") else "failed"

    def _number(self, rank: _Rank, event: object) -> None:
        if rank.rank == 0:
            self._facts.number(event)
        if isinstance(event, Progress):
            rank.pace.update(event)
        elif isinstance(event, Metrics):
            for name in ("loss", "train/loss"):
                if name in event.values:
                    rank.value = name, event.values[name]

    def redrawn(self, rank: int, text: str) -> None:
        """Show the rank's own progress bar below its row."""
        if rank in self._ranks:
            self._ranks[rank].redrawn = harmless(text)

    def log(self, rank: int, lines: Sequence[LogLine]) -> None:
        """Print the lines above the rows, with the next frame."""
        self._above.append(format_lines(rank, lines, self._colour, on_terminal=True))

    def log_line(self, text: str) -> None:
        """Print it above the rows, unless stderr is a file."""
        if self._stderr.is_terminal:
            self._print_above(text.splitlines(), "dim")
        else:
            super().log_line(text)

    def end(self, summary: Sequence[str], last_event: Mapping[str, Any]) -> None:
        """Print the summary below the rows, which stay as they are."""
        self._status, self._shown_from_s = "", 0.0
        self.refresh(time.monotonic())
        self._stdout.write(format_own(summary, self._colour, terminal_size(self._stdout.fd)[0]))
        self._row_widths = []

    def _print_above(self, lines: Sequence[str], style: str) -> None:
        text = format_own([harmless(line) for line in lines], self._colour, terminal_size(self._stdout.fd)[0], style)
        self._above.append(text)

    def refresh(self, now_s: float) -> None:
        """Draw a frame, if anything has changed."""
        size = columns, rows = terminal_size(self._stdout.fd)
        text, widths = self.frame(now_s - self._started_s, columns, rows) if now_s >= self._shown_from_s else ("", [])
        if not self._above and (text, size) == self._drawn:
            return
        # A terminal that has become narrower has wrapped the rows of the last frame. A single sequence that clears the
        # rest of the screen would be shorter, but if this is the whole screen, tmux copies it into its history.
        height = sum(max(-(-width // columns), 1) for width in self._row_widths)
        erase = _CLEAR_ROW + _UP_AND_CLEAR_ROW * min(height, rows - 1)
        self._stdout.write("".join([erase, *self._above, text]))
        self._above.clear()
        self._drawn, self._row_widths = (text, size), widths

    # --- the rows ---

    def frame(self, elapsed_s: float, columns: int, rows: int) -> tuple[str, list[int]]:
        """Return the rows as text, and their widths: at most half of the terminal, but at least one row."""
        from rich.console import Console
        from rich.segment import Segment, Segments
        from rich.text import Text

        width, room = max(columns - 1, 1), max(rows // 2, 1) - 1
        if self._other is not None:
            parts: list[RenderableType] = [Text(each) for each in self._other(self._status, elapsed_s, rows)]
        else:
            parts = self._rank_rows(width, room) if room else []
            parts.append(Text(self._status_text(elapsed_s, width), "dim"))
        output = _Output()
        output.encoding = self._stdout.encoding
        colours: Any = "standard" if self._colour else None
        console = Console(
            file=output, width=width, force_terminal=True, color_system=colours, legacy_windows=False, _environ={}
        )
        options = console.options.update(no_wrap=True, overflow="crop")
        lines = [line for part in parts for line in console.render_lines(part, options, pad=False)]
        for line in lines:
            console.print(Segments([*line, Segment.line()]), crop=False)
        return output.getvalue(), [Segment.get_line_length(line) for line in lines]

    def _rank_rows(self, width: int, room: int) -> list[RenderableType]:
        """Return a table of the ranks, and below it the bars that ranks draw themselves, if there is room."""
        from rich.table import Table
        from rich.text import Text

        groups = self._groups()
        if not groups:
            return []
        fit = len(groups) if len(groups) <= room else room - 1
        table = Table.grid(padding=(0, GAP, 0, 0))
        names = [name for name, least in COLUMNS.items() if width >= least]
        for name in names:
            table.add_column(no_wrap=True, justify="left" if name in ("name", "bar") else "right")
        for group in groups[:fit]:
            cells = self._cells(group, max(MIN_BAR, min(width - ROOM_BESIDE_BAR, MAX_BAR)))
            table.add_row(*(cells[name] for name in names))
        parts: list[RenderableType] = [table] if fit else []
        if rest := [rank for group in groups[fit:] for rank in group]:
            texts = [counted(len(rest), "more rank" if fit else "rank"), *_states(rest)]
            has_failed = any(rank.state == "failed" for rank in rest)
            parts.append(Text(self._dot.join(texts), "red" if has_failed else ""))
        bars = [next((each.redrawn for each in group if each.redrawn), "") for group in groups[:fit]]
        own = [Text(f"  {bar}", "dim") for bar in bars if bar]
        return [*parts, *own] if len(groups) + len(own) <= room else parts

    def _groups(self) -> list[list[_Rank]]:
        """Return the ranks of each row; none before any rank has reported anything."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if not any(rank.is_known for rank in ranks):
            return []
        known = [rank.pace for rank in ranks if rank.pace.done is not None]
        middle = statistics.median_low([pace.done or 0.0 for pace in known]) if known else 0.0
        rate = statistics.median([pace.rate for pace in known if pace.rate is not None] or [math.inf])

        def differs(rank: _Rank) -> bool:
            usual = max(BEHIND_S * rate, 2 * rank.pace.last_change)
            is_apart = rank.state == "running" and abs((rank.pace.done or 0.0) - middle) > usual
            return self._all_ranks or rank.state == "failed" or (rank.pace.done is not None and is_apart)

        apart = [[rank] for rank in ranks if differs(rank)]
        together = [rank for rank in ranks if not differs(rank)]
        return [together, *apart] if together else apart

    def _cells(self, ranks: Sequence[_Rank], bar_width: int) -> dict[str, RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        first, states = ranks[0], {rank.state for rank in ranks}
        name, style = counted(len(ranks), "rank"), "cyan"
        if len(ranks) == 1:
            several_hosts = len({rank.host for rank in self._ranks.values() if rank.host}) > 1
            name = f"rank {first.rank} on {first.host}" if several_hosts and first.host else f"rank {first.rank}"
            style = rank_style(first.rank)
        state = states.pop() if len(states) == 1 else ", ".join(_states(ranks))
        state = "" if state == "running" else state
        pace, values = _together([rank.pace for rank in ranks]), [rank.value for rank in ranks if rank.value]
        fraction, total = pace.fraction, "" if pace.total is None else f"/{number(pace.total)}"
        colour = "red" if state == "failed" else style
        bar = ProgressBar(1.0, fraction or 0.0, bar_width, complete_style=colour, finished_style=colour)
        return {
            "name": Text(name, style),
            "bar": "" if fraction is None else bar,
            "percent": "" if fraction is None else f"{math.floor(fraction * 100)}%",
            "count": "" if pace.done is None else f"{number(pace.done)}{total}",
            "value": f"{values[0][0]} {statistics.fmean(value for _, value in values):#.4g}" if values else "",
            "rate": pace.rate_text,
            "eta": Text(state or eta_text(pace), _STATE_STYLES.get(state, "dim")),
        }

    def _status_text(self, elapsed_s: float, columns: int) -> str:
        """Return the facts that fit, the most important ones first; of each the longest form that fits."""
        waits_for = self._silence
        if not waits_for and self._ranks and self._status.startswith("starting "):
            late = sum(rank.state == "waiting" for rank in self._ranks.values())
            waits_for = f"waiting for {counted(late, 'rank')} to import torch" if late else ""
            waits_for = waits_for or "waiting for the ranks to connect"
        status = [self._dot.join([self._status, waits_for]), waits_for] if waits_for else [self._status]
        run_id = self._run_id if len(self._run_id) <= 12 else f"...{self._run_id[-4:]}"
        use = [[text] for text in self._use.facts()]
        shown = ""
        for forms in [status, [clock(elapsed_s)], *self._facts.texts, *use, [self._run_id, run_id]]:
            longer = [f"{shown}{self._dot}{text}" if shown else text for text in forms if text]
            fitting = [text for text in longer if columns_of(text) <= columns]
            shown = fitting[0] if fitting else shown or "".join(longer[-1:])
        return shown


class _Output(io.StringIO):
    """What rich has written; it draws bars of "-" unless the encoding of the terminal is a form of Unicode."""

    encoding = ""


def _together(paces: Sequence[Pace]) -> Pace:
    """Return the progress of ranks as one: samples and their rates are summed, steps are those of the slowest rank."""
    known = [pace for pace in paces if pace.done is not None]
    if len(known) <= 1:
        return known[0] if known else Pace()
    slowest = min(known, key=lambda pace: (pace.fraction or 0.0, pace.done or 0.0))
    if slowest.unit.lower() in _SHARED_UNITS:
        return slowest
    group = Pace(slowest.unit)
    group.done = sum(pace.done or 0.0 for pace in known)
    if all(pace.total is not None for pace in known):
        group.total = sum(pace.total or 0.0 for pace in known)
    rates = [pace.rate for pace in known if pace.rate is not None]
    group.rate = sum(rates) if rates else None
    return group


def _states(ranks: Sequence[_Rank]) -> list[str]:
    counts = {state: sum(rank.state == state for rank in ranks) for state in ("waiting", "done", "stopped", "failed")}
    return [f"{count} {state}" for state, count in counts.items() if count]
