"""The live display: log lines, and below them a few rows that are redrawn.

Ranks in lockstep share one row; a rank that is behind or has failed has a row of its own. The last row says what
the run does and how far it is. rich is not used: its import would take 0.1 s of each start (docs/adr/0008).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddptrain.config.wording import counted
from ddptrain.driver.display import terminal
from ddptrain.driver.display.facts import Pace, RunFacts, clock, number
from ddptrain.driver.display.logs import RankLine
from ddptrain.driver.display.renderers import Renderer, format_lines, format_notice, format_own
from ddptrain.driver.display.terminal import Stream
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.system import SystemSummary
from ddptrain.text_tables import columns_of

LOCKSTEP_FROM = 3  # the smallest run whose ranks share a row
BEHIND_S = 5.0  # a rank whose progress differs from that of the others by more than they do in this time has a row
MIN_BAR, MAX_BAR, GAP = 8, 40, 2  # terminal columns
DROPPED_FIRST = ("count", "rate", "value", "eta")
# Every rank counts the same ones: no sum over the ranks.
_SHARED_UNITS = {"step", "steps", "batch", "batches", "epoch", "epochs", "iteration", "iterations", "it"}
_CLEAR_ROW, _UP_AND_CLEAR_ROW = "\r\x1b[2K", "\x1b[1A\x1b[2K"
_NOTICE_COLOURS = {"warning": terminal.YELLOW, "error": terminal.RED}
_STATE_COLOURS = {"done": terminal.GREEN, "failed": terminal.RED}

# Returns the rows of a sweep, for its status, the seconds since its start, and the rows of the terminal.
OtherRows = Callable[[str, float, int], Sequence[str]]


class Piece(NamedTuple):
    """Text in one colour (an SGR code; "" is none)."""

    text: str
    colour: str = ""


Row = Sequence[Piece]


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

    def take(self, event: object) -> None:
        """Take a number of the rank."""
        if isinstance(event, Progress):
            self.pace.update(event)
        elif isinstance(event, Metrics):
            for name in ("loss", "train/loss"):
                if name in event.values:
                    self.value = (name, event.values[name])


@dataclass
class _RankRow:
    """One row: a bar, which is filled to `fraction`, and texts by column."""

    name: str
    colour: str
    fraction: float | None
    columns: dict[str, str]
    state: str
    redrawn: str


class RunRows(Renderer):
    """The rows of a run."""

    def __init__(self, run_id: str, *, is_unicode: bool, all_ranks: bool = False) -> None:
        """With `all_ranks` each rank has a row, as far as there is room, however many ranks there are."""
        self.status = ""
        self._run_id = run_id
        self._ranks: dict[int, _Rank] = {}
        self._full, self._rest, self._dot = ("━", "─", " · ") if is_unicode else ("#", "-", " | ")
        self._all_ranks = all_ranks
        self._widths: dict[str, int] = {}  # of columns; they only grow, so that bars stay in place
        self._fitted_to = 0
        self._use = SystemSummary()
        self._silence = ""
        self._facts = RunFacts()

    def event(self, event: Mapping[str, Any]) -> None:
        """Update the rows."""
        self._facts.event(event)
        rank = self._ranks.get(rank) if isinstance(rank := event.get("rank"), int) else None
        match event:
            case {"event": "ranks", "count": count}:  # what is known of a rank stays until it starts again
                self._ranks = {rank: self._ranks.get(rank) or _Rank(rank) for rank in range(count)}
            case {"event": "numbers", "numbers": numbers}:
                for each in numbers:
                    self._facts.rank_event(event["rank"], each)
                    if rank is not None:
                        rank.take(each)
            case {"event": "system", "sample": sample}:
                self._use.add(sample)
            case {"event": "silence", "message": str(text)}:
                self._silence = text
            case {"event": "status", "message": str(text)}:
                self.status = terminal.harmless(" ".join(text.split()), False)
            case {"event": "rank_started"} if rank is not None:
                host = terminal.harmless(str(event.get("host", "")), False)
                self._ranks[rank.rank] = _Rank(rank.rank, host, "running")
            case {"event": "rank_ended"} if rank is not None:
                rank.state = "done" if event.get("ok") is True else "stopped" if event.get("stopped") else "failed"

    def redrawn(self, rank: int, text: str) -> None:
        """Show the rank's own progress bar below its row."""
        if rank in self._ranks:
            self._ranks[rank].redrawn = text

    def block(self, elapsed_s: float, columns: int, rows: int) -> list[Row]:
        """Return at most half of the terminal's `rows` (but at least one), none wider than `columns`."""
        room = max(rows // 2, 1) - 1
        shown = self._rank_rows(self._groups(), columns, room) if room else []
        return [_cropped(row, columns) for row in [*shown, self._status_row(elapsed_s, columns)]]

    # --- which ranks have a row ---

    def _groups(self) -> list[list[_Rank]]:
        """Return the ranks of each row; none before any rank has reported anything."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if not any(rank.is_known for rank in ranks):
            return []
        if self._all_ranks or len(ranks) < LOCKSTEP_FROM:
            return [[rank] for rank in ranks]
        differs = _differing(ranks)
        together = [rank for rank in ranks if not differs(rank)]
        return [group for group in [together, *([rank] for rank in ranks if differs(rank))] if group]

    def _rank_rows(self, groups: Sequence[Sequence[_Rank]], columns: int, room: int) -> list[Row]:
        fit = len(groups) if len(groups) <= room else room - 1
        hosts = {rank.host for rank in self._ranks.values() if rank.host}
        shown = [self._described(group, len(hosts) > 1) for group in groups[:fit]]
        names = self._fitted(shown, columns)
        rows = [self._row(row, names, columns) for row in shown]
        if len(groups) + sum(bool(row.redrawn) for row in shown) <= room:
            drawn = [[Piece("  " + terminal.harmless(row.redrawn, False), terminal.DIM)] for row in shown]
            pairs = zip(rows, drawn, shown, strict=True)
            rows = [each for row, bar, of in pairs for each in ([row, bar] if of.redrawn else [row])]
        if rest := [rank for group in groups[fit:] for rank in group]:
            texts = [counted(len(rest), "more rank" if fit else "rank"), *_states(rest)]
            rows.append([Piece(self._dot.join(texts), terminal.RED if _any_failed(rest) else "")])
        return rows

    def _described(self, ranks: Sequence[_Rank], with_host: bool) -> _RankRow:
        first = ranks[0]
        if len(ranks) == 1:
            name = f"rank {first.rank} on {first.host}" if with_host and first.host else f"rank {first.rank}"
            state = "" if first.state == "running" else first.state
            colour = terminal.rank_colour(first.rank)
        else:
            name, colour = counted(len(ranks), "rank"), terminal.CYAN
            states = {rank.state for rank in ranks}
            state = states.pop() if len(states) == 1 else ", ".join(_states(ranks))
            state = "" if state == "running" else state
        pace, values = _together([rank.pace for rank in ranks]), [rank.value for rank in ranks if rank.value]
        total = "" if pace.total is None else f"/{number(pace.total)}"
        fraction = pace.fraction if pace.fraction is not None or state != "done" else 1.0
        eta = "" if pace.eta_s is None else f"ETA {clock(pace.eta_s)}"
        texts = {
            "percent": "" if pace.fraction is None else f"{math.floor(pace.fraction * 100)}%",
            "count": "" if pace.done is None else f"{number(pace.done)}{total}",
            "value": f"{values[0][0]} {statistics.fmean(value for _, value in values):#.4g}" if values else "",
            "rate": "" if pace.rate is None else f"{number(pace.rate)} {pace.shown_unit}/s",
            "eta": state or eta,
        }
        return _RankRow(
            name, colour, fraction, texts, state, next((each.redrawn for each in ranks if each.redrawn), "")
        )

    # --- how a row looks ---

    def _fitted(self, rows: Sequence[_RankRow], columns: int) -> list[str]:
        """Return the columns that fit beside a bar; the least important ones are left out first."""
        if columns != self._fitted_to:
            self._widths, self._fitted_to = {}, columns
        for row in rows:
            for name, text in {"name": row.name, **row.columns}.items():
                self._widths[name] = max(self._widths.get(name, 0), columns_of(text))
        names = [name for name, width in self._widths.items() if width]
        for name in DROPPED_FIRST:
            if self._bar_width(names, columns) < MIN_BAR and name in names:
                names.remove(name)
        return names

    def _bar_width(self, names: Sequence[str], columns: int) -> int:
        return min(columns - sum(self._widths[name] + GAP for name in names), MAX_BAR)

    def _row(self, row: _RankRow, names: Sequence[str], columns: int) -> Row:
        pieces = [Piece(row.name + " " * (self._widths["name"] - columns_of(row.name)), row.colour)]
        width = self._bar_width(names, columns)
        if width >= MIN_BAR and self._widths.get("percent"):
            full = math.floor((row.fraction or 0.0) * width)
            colour = terminal.RED if row.state == "failed" else row.colour
            pieces += [Piece(" " * GAP), Piece(self._full * full, colour)]
            pieces += [Piece(self._rest * (width - full), terminal.DIM)]
        for name in names[1:]:
            text = row.columns[name]
            colour = _STATE_COLOURS.get(row.state, terminal.DIM) if name == "eta" else ""
            pieces += [Piece(" " * (GAP + self._widths[name] - columns_of(text))), Piece(text, colour)]
        return pieces

    def _status_row(self, elapsed_s: float, columns: int) -> Row:
        """Return the facts that fit, the most important ones first; of each the longest form that fits."""
        facts = self._facts
        waits_for = self._silence or self._waits_for
        status = [self._dot.join([self.status, waits_for]), waits_for] if waits_for else [self.status]
        texts: list[Sequence[str]] = [status, [clock(elapsed_s)]]
        texts += [[facts.epoch_text], facts.metric_texts, [facts.restarts_text], facts.saved_texts]
        texts += [*([text] for text in self._use.facts()), [self._run_id, terminal.short_run_id(self._run_id)]]
        shown = ""
        for forms in texts:
            longer = [f"{shown}{self._dot}{text}" if shown else text for text in forms if text]
            fitting = [text for text in longer if columns_of(text) <= columns]
            shown = fitting[0] if fitting else shown or "".join(longer[-1:])
        return [Piece(shown, terminal.DIM)]

    @property
    def _waits_for(self) -> str:
        """What the ranks do while the driver starts them; "" at other times."""
        if not self._ranks or not self.status.startswith("starting "):
            return ""
        late = sum(rank.state == "waiting" for rank in self._ranks.values())
        return f"waiting for {counted(late, 'rank')} to import torch" if late else "waiting for the ranks to connect"


def _differing(ranks: Sequence[_Rank]) -> Callable[[_Rank], bool]:
    """Return what says whether a rank differs from the others: it has failed, or is behind or ahead."""
    known = [rank.pace for rank in ranks if rank.pace.done is not None]
    middle = statistics.median_low([pace.done or 0.0 for pace in known]) if known else 0.0
    rate = statistics.median([pace.rate for pace in known if pace.rate is not None] or [math.inf])

    def differs(rank: _Rank) -> bool:
        done = rank.pace.done
        usual = max(BEHIND_S * rate, 2 * rank.pace.last_change)
        is_apart = done is not None and rank.state == "running" and abs(done - middle) > usual
        return rank.state == "failed" or is_apart

    return differs


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
    counts: Mapping[str, int] = {
        state: sum(rank.state == state for rank in ranks) for state in ("waiting", "done", "stopped", "failed")
    }
    return [f"{count} {state}" for state, count in counts.items() if count]


def _any_failed(ranks: Sequence[_Rank]) -> bool:
    return any(rank.state == "failed" for rank in ranks)


def _cropped(row: Row, columns: int) -> Row:
    kept: list[Piece] = []
    for piece in row:
        text = terminal.cropped(piece.text, columns)
        columns -= columns_of(text)
        kept.append(Piece(text, piece.colour))
    return kept


class LiveRenderer(RunRows):
    """Draws on any terminal that can move its cursor up and clear a row.

    The cursor stays visible at the start of the row below the block, so that the terminal is usable even after a kill.
    Log lines and rows are written together, to avoid flicker.
    """

    redraw_every_s = 0.1

    def __init__(
        self,
        stdout: Stream,
        stderr: Stream,
        size: Callable[[], tuple[int, int]],
        colour: bool,
        run_id: str,
        *,
        all_ranks: bool = False,
        rows: OtherRows | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """`size` returns columns and rows. `elapsed_s`: how long the run has already been running."""
        super().__init__(run_id, is_unicode=stdout.encoding.startswith("utf"), all_ranks=all_ranks)
        self._stdout, self._stderr, self._size, self._colour, self._other = stdout, stderr, size, colour, rows
        self._above: list[str] = []  # to be printed above the rows with the next frame
        self._drawn: list[str] = []
        self._widths_drawn: list[int] = []  # of the rows of the last frame
        self._drawn_size = (0, 0)
        self._started_s = time.monotonic() - elapsed_s

    def log(self, rank: int, lines: Sequence[RankLine]) -> None:
        """Print the lines above the rows, with the next frame."""
        self._above.append(format_lines(rank, lines, self._colour, on_terminal=True))

    def event(self, event: Mapping[str, Any]) -> None:
        """Update the rows; print a notice above them."""
        super().event(event)
        match event:
            case {"event": "notice", "message": str(text)}:
                self._print_above(format_notice(text), _NOTICE_COLOURS.get(str(event.get("level")), ""))

    def log_line(self, text: str) -> None:
        """Print it above the rows, unless stderr is a file."""
        if self._stderr.is_terminal:
            self._print_above(text, terminal.DIM)
        else:
            self._stderr.write(f"{text}\n")

    def end(self, summary: Sequence[str], last_event: Mapping[str, Any]) -> None:
        """Print the summary below the rows, which stay as they are."""
        self.status = ""
        self.refresh(time.monotonic())
        self._stdout.write(format_own(summary, self._colour, self._size()[0]))
        self._drawn, self._widths_drawn = [], []

    def _print_above(self, text: str, colour: str) -> None:
        columns = self._size()[0]
        for line in text.splitlines():
            for part in terminal.wrapped(terminal.harmless(line, False), columns):
                self._above.append(terminal.coloured(part, colour if self._colour else "") + "\n")

    def refresh(self, now_s: float) -> None:
        """Draw a frame, if anything has changed."""
        size = columns, rows = self._size()
        elapsed_s, width = now_s - self._started_s, max(columns - 1, 1)
        if self._other is None:
            block = self.block(elapsed_s, width, rows)
        else:
            block = [_cropped([Piece(text)], width) for text in self._other(self.status, elapsed_s, rows)]
        drawn = ["".join(terminal.coloured(*piece) if self._colour else piece.text for piece in row) for row in block]
        if not self._above and drawn == self._drawn and size == self._drawn_size:
            return
        # A terminal that has become narrower has wrapped the rows of the last frame. A single sequence that clears the
        # rest of the screen would be shorter, but if this is the whole screen, tmux copies it into its history.
        height = sum(max(-(-width // columns), 1) for width in self._widths_drawn)
        erase = _CLEAR_ROW + _UP_AND_CLEAR_ROW * min(height, rows - 1)
        self._stdout.write("".join([erase, *self._above, *(f"{row}\n" for row in drawn)]))
        self._above.clear()
        self._drawn, self._drawn_size = drawn, size
        self._widths_drawn = [sum(columns_of(piece.text) for piece in row) for row in block]
