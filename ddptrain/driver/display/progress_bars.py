"""The block under the log lines of a live display: a bar a rank, and a line of what is going on.

Nothing here writes: `Bars.block` answers rows of coloured pieces, fitted to a terminal's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddptrain.driver.display import messages as told
from ddptrain.driver.display import terminal
from ddptrain.driver.display.rate import Pace

MIN_BAR, MAX_BAR, GAP = 8, 40, 2  # terminal columns
LEFT = ("name", "host")  # stand before the bar, all else behind it
DROPPED_FIRST = ("host", "count", "rate", "eta", "loss")


class Piece(NamedTuple):
    """Text in one colour (an SGR code; "" is none)."""

    text: str
    colour: str = ""


Row = tuple[Piece, ...]


class Glyphs(NamedTuple):
    """What bars are drawn with."""

    full: str
    rest: str
    dot: str


UNICODE_GLYPHS = Glyphs("━", "─", "·")
ASCII_GLYPHS = Glyphs("#", "-", "|")


@dataclass
class RankBar:
    """What is known of one rank."""

    rank: int
    host: str = ""
    state: str = "waiting"  # then running, done, stopped or failed
    loss: float | None = None
    redrawn: str = ""
    pace: Pace = field(default_factory=Pace)

    def tell(self, message: told.RankStarted | told.RankEnded | told.RankMetrics | told.RankProgress) -> None:
        """Take a message about this rank in; a new start forgets the attempt before."""
        match message:
            case told.RankStarted(_, host, _):
                self.host, self.state, self.loss = terminal.harmless(host, False), "running", None
                self.redrawn, self.pace = "", Pace()
            case told.RankEnded(_, ok, stopped):
                self.state = "done" if ok else "stopped" if stopped else "failed"
            case told.RankMetrics(_, event):
                self.loss = event.values.get("train/loss", event.values.get("loss", self.loss))
            case told.RankProgress(_, event):
                self.pace.update(event)


class Bars:
    """The state of all ranks, and how it looks."""

    def __init__(self, run_id: str, glyphs: Glyphs) -> None:
        self.status = ""
        self._run_id = run_id
        self._ranks: dict[int, RankBar] = {}
        self._glyphs = glyphs
        self._widths: dict[str, int] = {}  # of columns: they only grow, so that bars don't jump about
        self._fitted_to = 0

    def tell(self, message: told.Message) -> None:
        """Take a message in."""
        match message:
            case told.Status(text):
                self.status = terminal.harmless(" ".join(text.split()), False)
            case told.Expected(world_size):
                for rank in range(world_size):
                    self._rank(rank)
            case told.Redrawn(rank, text):
                self._rank(rank).redrawn = text
            case told.RankStarted() | told.RankEnded() | told.RankMetrics() | told.RankProgress():
                self._rank(message.rank).tell(message)
            case _:
                pass

    def block(self, elapsed_s: float, columns: int, rows: int) -> list[Row]:
        """At most half of the rows (but one at least), none of them wider than `columns`."""
        room = max(rows // 2, 1)
        bars = sorted(self._ranks.values(), key=lambda bar: bar.rank)
        fit = len(bars) if len(bars) < room else max(room - 2, 0)
        shown = self._fitted(bars[:fit], columns)
        if len(bars) + sum(bool(bar.redrawn) for bar in bars) < room:
            shown = _with_redrawn(shown, bars)
        if fit < len(bars) and room > 1:
            shown.append(self._rest(bars[fit:], "more ranks" if fit else "ranks"))
        return [_cropped(row, columns) for row in [*shown, self._status_row(elapsed_s)]]

    def _rank(self, rank: int) -> RankBar:
        return self._ranks.setdefault(rank, RankBar(rank))

    def _fitted(self, bars: Sequence[RankBar], columns: int) -> list[Row]:
        """The bars as aligned rows; what matters least is left out first where columns are few."""
        if columns != self._fitted_to:
            self._widths, self._fitted_to = {}, columns
        several_hosts = len({bar.host for bar in self._ranks.values() if bar.host}) > 1
        texts = [_columns_of(bar, several_hosts) for bar in bars]
        for row in texts:
            for name, text in row.items():
                self._widths[name] = max(self._widths.get(name, 0), terminal.cells(text))
        names = [name for name, width in self._widths.items() if width]
        for name in DROPPED_FIRST:
            if self._bar_width(names, columns) < MIN_BAR and name in names:
                names.remove(name)
        return [self._row(bar, row, names, columns) for bar, row in zip(bars, texts, strict=True)]

    def _bar_width(self, names: Sequence[str], columns: int) -> int:
        return min(columns - sum(self._widths[name] + GAP for name in names), MAX_BAR)

    def _row(self, bar: RankBar, texts: dict[str, str], names: Sequence[str], columns: int) -> Row:
        row: list[Piece] = []
        for name in names:
            pad = " " * (self._widths[name] - terminal.cells(texts[name]))
            if name in LEFT:
                row += [Piece(texts[name] + pad, terminal.rank_colour(bar.rank)), Piece(" " * GAP)]
            else:
                row += [Piece(" " * GAP), Piece(pad + texts[name], _colour_of(name, bar))]
            if name == LEFT[-1] or (name == LEFT[0] and LEFT[-1] not in names):
                row += self._drawn(bar, self._bar_width(names, columns))
        return tuple(row)

    def _drawn(self, bar: RankBar, width: int) -> Row:
        if width < MIN_BAR:
            return ()
        known = bar.pace.fraction
        fraction = known if known is not None else float(bar.state == "done")
        full = math.floor(fraction * width)
        colour = terminal.RED if bar.state == "failed" else terminal.rank_colour(bar.rank)
        return Piece(self._glyphs.full * full, colour), Piece(self._glyphs.rest * (width - full), terminal.DIM)

    def _rest(self, bars: Sequence[RankBar], name: str) -> Row:
        """One row that stands for many ranks."""
        facts = [f"{len(bars)} {name}"]
        known = [bar.pace.fraction for bar in bars if bar.pace.fraction is not None]
        if known:
            facts.append(f"{min(known):.0%} to {max(known):.0%}")
        rates = [bar.pace.rate for bar in bars if bar.pace.rate is not None]
        if rates:
            facts.append(f"{_number(sum(rates))} {_unit(bars[0])}/s in all")
        for state in ("waiting", "done", "stopped", "failed"):
            count = sum(bar.state == state for bar in bars)
            if count:
                facts.append(f"{count} {state}")
        failed = any(bar.state == "failed" for bar in bars)
        return (Piece(f" {self._glyphs.dot} ".join(facts), terminal.RED if failed else ""),)

    def _status_row(self, elapsed_s: float) -> Row:
        facts = [self._run_id, _clock(elapsed_s), self.status]
        return (Piece(f" {self._glyphs.dot} ".join(fact for fact in facts if fact), terminal.DIM),)


def _columns_of(bar: RankBar, several_hosts: bool) -> dict[str, str]:
    """The texts of a bar's row, by column, in the order shown."""
    pace = bar.pace
    total = "" if pace.total is None else f"/{_number(pace.total)}"
    return {
        "name": f"rank {bar.rank}",
        "host": bar.host if several_hosts else "",
        "percent": "" if pace.fraction is None else f"{math.floor(pace.fraction * 100)}%",
        "count": "" if pace.done is None else f"{_number(pace.done)}{total}",
        "loss": "" if bar.loss is None else f"loss {bar.loss:#.4g}",
        "rate": "" if pace.rate is None else f"{_number(pace.rate)} {_unit(bar)}/s",
        "eta": _state(bar),
    }


def _state(bar: RankBar) -> str:
    if bar.state != "running":
        return bar.state
    return "" if bar.pace.eta_s is None else f"ETA {_clock(bar.pace.eta_s)}"


def _colour_of(name: str, bar: RankBar) -> str:
    if name == "eta":
        return {"done": terminal.GREEN, "failed": terminal.RED}.get(bar.state, terminal.DIM)
    return ""


def _unit(bar: RankBar) -> str:
    return terminal.harmless(bar.pace.unit, False)[:20]


def _number(value: float) -> str:
    """A number that is read at a glance: 12,345 or 3.14."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """1:05 or 2:00:00."""
    minutes, rest = divmod(int(min(seconds, 360_000_000)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _with_redrawn(rows: Sequence[Row], bars: Sequence[RankBar]) -> list[Row]:
    """The rows, and under each the progress bar that its rank draws itself."""
    both: list[Row] = []
    for row, bar in zip(rows, bars, strict=True):
        both.append(row)
        if bar.redrawn:
            both.append((Piece("  " + terminal.harmless(bar.redrawn, False), terminal.DIM),))
    return both


def _cropped(row: Row, columns: int) -> Row:
    kept: list[Piece] = []
    for piece in row:
        text = terminal.cropped(piece.text, columns)
        columns -= terminal.cells(text)
        kept.append(Piece(text, piece.colour))
    return tuple(kept)
