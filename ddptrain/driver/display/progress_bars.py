"""The block below the log lines of a live display: progress bars, and a row with the driver's status.

Each rank has a bar; with 17 or more ranks there is one bar for all. This module writes nothing: `Bars.block` returns
rows of coloured pieces that fit the size of a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddptrain.config.wording import counted
from ddptrain.driver.display import output_api, terminal
from ddptrain.driver.display.grouping import MIN_RANKS
from ddptrain.driver.display.pace import Pace, clock, number
from ddptrain.driver.display.run_facts import RunFacts
from ddptrain.results.system import SystemSummary

MIN_BAR, MAX_BAR, GAP = 8, 40, 2  # terminal columns
LEFT = ("name", "host")  # columns before the bar; all others come after it
DROPPED_FIRST = ("host", "count", "rate", "eta", "loss")


class Piece(NamedTuple):
    """Text in one colour (an SGR code; "" is none)."""

    text: str
    colour: str = ""


Row = tuple[Piece, ...]


class Glyphs(NamedTuple):
    """The characters of a bar."""

    full: str
    rest: str
    dot: str


UNICODE_GLYPHS = Glyphs("━", "─", "·")
ASCII_GLYPHS = Glyphs("#", "-", "|")


@dataclass
class RankBar:
    """What is known about one rank."""

    rank: int
    host: str = ""
    state: str = "waiting"  # then running, done, stopped or failed
    loss: float | None = None
    loss_name: str = ""
    redrawn: str = ""
    pace: Pace = field(default_factory=Pace)

    def handle(self, message: output_api.Message) -> None:
        """Handle a message about this rank. A new start clears the values of the last attempt."""
        match message:
            case output_api.RankStarted(_, host, _):
                self.host, self.state, self.loss = terminal.harmless(host, False), "running", None
                self.redrawn, self.pace = "", Pace()
            case output_api.RankEnded(_, ok, stopped):
                self.state = "done" if ok else "stopped" if stopped else "failed"
            case output_api.RankMetrics(_, event):
                for name in ("loss", "train/loss"):
                    if name in event.values:
                        self.loss, self.loss_name = event.values[name], name
            case output_api.RankProgress(_, event):
                self.pace.update(event)

    @property
    def fraction(self) -> float:
        """How much of the bar is filled, 0 to 1."""
        known = self.pace.fraction
        return known if known is not None else float(self.state == "done")

    @property
    def columns(self) -> dict[str, str]:
        """The texts of the bar's row, by column, in the order shown."""
        state = "" if self.pace.eta_s is None else f"ETA {clock(self.pace.eta_s)}"
        state = state if self.state == "running" else self.state
        return {"name": f"rank {self.rank}", "host": self.host} | _columns(self.pace, self.loss, state, self.loss_name)


class Bars:
    """The state of all ranks, and how it is shown."""

    def __init__(self, run_id: str, glyphs: Glyphs, *, all_ranks: bool = False) -> None:
        """With `all_ranks` each rank has a bar, as far as there is room, however many ranks there are."""
        self.status = ""
        self._run_id = run_id
        self._ranks: dict[int, RankBar] = {}
        self._glyphs = glyphs
        self._all_ranks = all_ranks
        self._widths: dict[str, int] = {}  # of columns; they only grow, so that bars stay in place
        self._fitted_to = 0
        self._use = SystemSummary()
        self._silence = ""
        self._facts = RunFacts()
        self._has_fractions = False  # else no bar is drawn

    def handle(self, message: output_api.Message) -> None:
        """Update the state after a message."""
        self._facts.handle(message)
        match message:
            case output_api.SystemUse(sample):
                self._use.add(sample)
            case output_api.DriverStatus(text):
                self.status = terminal.harmless(" ".join(text.split()), False)
            case output_api.Silence(text):
                self._silence = text
            case output_api.WorldSize(world_size):
                for rank in range(world_size):
                    self._rank(rank)
            case output_api.RedrawnLine(rank, text):
                self._rank(rank).redrawn = text
            case (
                output_api.RankStarted() | output_api.RankEnded() | output_api.RankMetrics() | output_api.RankProgress()
            ):
                self._rank(message.rank).handle(message)
            case _:
                pass

    def block(self, elapsed_s: float, columns: int, rows: int) -> list[Row]:
        """Return at most half of the terminal's `rows` (but at least one), none wider than `columns`."""
        room = max(rows // 2, 1)
        self._has_fractions = any(bar.pace.fraction is not None or bar.state == "done" for bar in self._ranks.values())
        bars = sorted(self._ranks.values(), key=lambda bar: bar.rank)
        if len(bars) >= MIN_RANKS and not self._all_ranks:
            shown = self._group(bars, columns)[: room - 1]
        else:
            shown = self._each(bars, columns, room)
        return [_cropped(row, columns) for row in [*shown, self._status_row(elapsed_s, columns)]]

    def _rank(self, rank: int) -> RankBar:
        return self._ranks.setdefault(rank, RankBar(rank))

    def _each(self, bars: Sequence[RankBar], columns: int, room: int) -> list[Row]:
        """Return a row with a bar for each rank, and one row for all ranks for which there is no room."""
        fit = len(bars) if len(bars) < room else max(room - 2, 0)
        several_hosts = len({bar.host for bar in bars if bar.host}) > 1
        texts = [bar.columns | ({} if several_hosts else {"host": ""}) for bar in bars[:fit]]
        names = self._fitted(texts, columns)
        shown = [self._row(bar, row, names, columns) for bar, row in zip(bars, texts, strict=False)]
        if len(bars) + sum(bool(bar.redrawn) for bar in bars) < room:
            shown = _with_redrawn(shown, bars)
        if fit < len(bars) and room > 1:
            known = [bar.pace.fraction for bar in bars[fit:] if bar.pace.fraction is not None]
            facts = [f"{len(bars) - fit} {'more ranks' if fit else 'ranks'}"]
            facts += [f"{min(known):.0%} to {max(known):.0%}"] if known else []
            shown.append(self._facts_row([*facts, *_rate_of(bars[fit:]), *_states(bars[fit:])], bars[fit:]))
        return shown

    # --- one bar for many ranks ---

    def _group(self, bars: Sequence[RankBar], columns: int) -> list[Row]:
        """Return one bar for all ranks, and a row that names the slowest and the fastest."""
        losses = [bar.loss for bar in bars if bar.loss is not None]
        etas = [bar.pace.eta_s for bar in bars if bar.pace.eta_s is not None and bar.state == "running"]
        eta = f"ETA {clock(max(etas))}" if etas else ""
        loss = sum(losses) / len(losses) if losses else None
        name = next((bar.loss_name for bar in bars if bar.loss_name), "")
        texts = {"name": f"{len(bars)} ranks", "host": ""} | _columns(_sum(bars), loss, eta, name)
        fraction = sum(bar.fraction for bar in bars) / len(bars)
        texts["percent"] = f"{math.floor(fraction * 100)}%"
        failed = any(bar.state == "failed" for bar in bars)
        names = self._fitted([texts], columns)
        bar = self._drawn(fraction, terminal.RED if failed else terminal.CYAN, self._bar_width(names, columns))
        row = self._joined(texts, names, bar, terminal.CYAN, "")
        return [row, self._facts_row([*_extremes(bars), *_states(bars)], bars)]

    def _facts_row(self, facts: Sequence[str], bars: Sequence[RankBar]) -> Row:
        failed = any(bar.state == "failed" for bar in bars)
        return (Piece(f" {self._glyphs.dot} ".join(facts), terminal.RED if failed else ""),)

    # --- rows ---

    def _fitted(self, texts: Sequence[Mapping[str, str]], columns: int) -> list[str]:
        """Return the columns that fit beside a bar; the least important ones are left out first."""
        if columns != self._fitted_to:
            self._widths, self._fitted_to = {}, columns
        for row in texts:
            for name, text in row.items():
                self._widths[name] = max(self._widths.get(name, 0), terminal.cells(text))
        names = [name for name, width in self._widths.items() if width]
        for name in DROPPED_FIRST:
            if self._bar_width(names, columns) < MIN_BAR and name in names:
                names.remove(name)
        return names

    def _bar_width(self, names: Sequence[str], columns: int) -> int:
        return min(columns - sum(self._widths[name] + GAP for name in names), MAX_BAR)

    def _row(self, bar: RankBar, texts: Mapping[str, str], names: Sequence[str], columns: int) -> Row:
        colour = terminal.rank_colour(bar.rank)
        bar_colour = terminal.RED if bar.state == "failed" else colour
        drawn = self._drawn(bar.fraction, bar_colour, self._bar_width(names, columns))
        return self._joined(texts, names, drawn, colour, bar.state)

    def _joined(self, texts: Mapping[str, str], names: Sequence[str], bar: Row, colour: str, state: str) -> Row:
        row: list[Piece] = []
        for name in names:
            pad = " " * (self._widths[name] - terminal.cells(texts[name]))
            if name in LEFT:
                row += [Piece(texts[name] + pad, colour), Piece(" " * GAP)]
            else:
                state_colour = {"done": terminal.GREEN, "failed": terminal.RED}.get(state, terminal.DIM)
                row += [Piece(" " * GAP), Piece(pad + texts[name], state_colour if name == "eta" else "")]
            if name == LEFT[-1] or (name == LEFT[0] and LEFT[-1] not in names):
                row += bar
        return tuple(row)

    def _drawn(self, fraction: float, colour: str, width: int) -> Row:
        if width < MIN_BAR or not self._has_fractions:
            return ()
        full = math.floor(fraction * width)
        return Piece(self._glyphs.full * full, colour), Piece(self._glyphs.rest * (width - full), terminal.DIM)

    def _status_row(self, elapsed_s: float, columns: int) -> Row:
        """Return the facts that fit, the most important ones first."""
        facts = self._facts
        texts = [self.status, self._silence or self._waits_for, clock(elapsed_s), facts.epoch_text, facts.metric_text]
        texts += [facts.saved_text, facts.restarts_text, *self._use.facts(), self._run_id]
        shown = ""
        for text in filter(None, texts):
            longer = f"{shown} {self._glyphs.dot} {text}" if shown else text
            if not shown or terminal.cells(longer) <= columns:
                shown = longer
        return (Piece(shown, terminal.DIM),)

    @property
    def _waits_for(self) -> str:
        """What the ranks do while the driver starts them; "" at other times."""
        if not self._ranks or not self.status.startswith("starting "):
            return ""
        late = sum(bar.state == "waiting" for bar in self._ranks.values())
        return f"{counted(late, 'rank')} to import torch" if late else "the ranks connect"


def _columns(pace: Pace, loss: float | None, state: str, loss_name: str = "loss") -> dict[str, str]:
    total = "" if pace.total is None else f"/{number(pace.total)}"
    return {
        "percent": "" if pace.fraction is None else f"{math.floor(pace.fraction * 100)}%",
        "count": "" if pace.done is None else f"{number(pace.done)}{total}",
        "loss": "" if loss is None else f"{loss_name} {loss:#.4g}",
        "rate": "" if pace.rate is None else f"{number(pace.rate)} {pace.shown_unit}/s",
        "eta": state,
    }


def _sum(bars: Sequence[RankBar]) -> Pace:
    """Return the sums of progress and rate over all ranks; the total is known if that of each rank is known."""
    group = Pace()
    paces = [bar.pace for bar in bars if bar.pace.done is not None]
    totals = [pace.total for pace in paces if pace.total is not None]
    rates = [pace.rate for pace in paces if pace.rate is not None]
    if paces:
        group.unit = paces[0].unit
        group.done = sum(pace.done for pace in paces if pace.done is not None)
    if totals and len(totals) == len(bars):
        group.total = sum(totals)
    group.rate = sum(rates) if rates else None
    return group


def _extremes(bars: Sequence[RankBar]) -> list[str]:
    """Return the slowest and the fastest rank that has reported progress: by progress, then by rate."""
    known = [bar for bar in bars if bar.pace.done is not None]
    if not known:
        return []

    def pace_of(bar: RankBar) -> tuple[float, float, int]:
        fraction = bar.pace.fraction
        done = bar.pace.done or 0.0
        return (done if fraction is None else fraction, bar.pace.rate or 0.0, -bar.rank)

    return [f"{word} {_described(end(known, key=pace_of))}" for word, end in (("slowest", min), ("fastest", max))]


def _described(bar: RankBar) -> str:
    """Return a rank's progress as text, for example "rank 3 on node-1 52% 1,234 samples/s"."""
    texts = _columns(bar.pace, None, "")
    host = f"on {bar.host}" if bar.host else ""
    return " ".join(filter(None, (f"rank {bar.rank}", host, texts["percent"] or texts["count"], texts["rate"])))


def _rate_of(bars: Sequence[RankBar]) -> list[str]:
    group = _sum(bars)
    return [] if group.rate is None else [f"{number(group.rate)} {bars[0].pace.shown_unit}/s in all"]


def _states(bars: Sequence[RankBar]) -> list[str]:
    counts = {state: sum(bar.state == state for bar in bars) for state in ("waiting", "done", "stopped", "failed")}
    return [f"{count} {state}" for state, count in counts.items() if count]


def _with_redrawn(rows: Sequence[Row], bars: Sequence[RankBar]) -> list[Row]:
    """Return the rows, each followed by the progress bar that its rank draws itself."""
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
