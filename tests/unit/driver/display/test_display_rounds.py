"""The rounds of the display's thread, one by one, without the thread and with a clock of the test."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.display import Display, open_display, output_api, terminal
from ddptrain.driver.display import display as display_display
from ddptrain.driver.display.line_assembler import RankLine
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.protocol.worker_notices import SystemSample


class Renderer:
    """Notes what it is told."""

    redraw_every_s = 1.0

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.logged: list[tuple[list[int], list[str]]] = []

    def handle(self, message: Any) -> None:
        self.told.append(message)

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        self.logged.append((list(ranks), [line.text for line in lines]))

    def refresh(self, now_s: float) -> None:
        self.told.append(f"refresh {now_s:g}")


class Output:
    """A stream that notes what must be written within a time."""

    def __init__(self) -> None:
        self.broken, self.sent_bytes = "", 0
        self.last: list[tuple[str, float]] = []

    def write_within(self, text: str, timeout_s: float) -> None:
        self.last.append((text, timeout_s))


class Idle:
    """A display whose thread was not started."""

    def __init__(self, folder: Path, *, groups_ranks: bool = False) -> None:
        self.renderer, self.out, self.err = Renderer(), Output(), Output()
        self.aborted = threading.Event()
        parts: tuple[Any, Any, Any] = self.renderer, self.out, self.err
        self.display = Display(*parts, folder, self.aborted, groups_ranks=groups_ranks)

    def delivered(self) -> list[Any]:
        self.renderer.told.clear()
        self.display._deliver()
        return self.renderer.told


@pytest.fixture
def idle(tmp_path: Path) -> Idle:
    return Idle(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0, slept=[])
    made.monotonic = lambda: made.now
    made.sleep = made.slept.append
    monkeypatch.setattr(display_display, "time", made)
    return made


def test_each_event_of_a_run_becomes_a_message_of_its_own(idle: Idle) -> None:
    display, sample = idle.display, SystemSample(1, 0, 1, "a", {}, {})
    display.rank_started(1, "node", 7)
    display.rank_ended(1, False, True)
    display.rank_ended(2, True)
    display.metrics(1, Metrics(1, {}))
    display.progress(1, Progress(1, 2.0, 3.0, "steps"))
    display.status("waiting")
    display.notice("saved")
    display.notice("lost", "error")
    display.event({"a": 1})
    display.system(sample)
    display._log_line("a line")
    assert idle.delivered() == [
        output_api.RankStarted(1, "node", 7),
        output_api.RankEnded(1, False, True),
        output_api.RankEnded(2, True, False),
        output_api.RankMetrics(1, Metrics(1, {})),
        output_api.RankProgress(1, Progress(1, 2.0, 3.0, "steps")),
        output_api.DriverStatus("waiting"),
        output_api.DriverNotice("saved", "info"),
        output_api.DriverNotice("lost", "error"),
        output_api.RawEvent({"a": 1}),
        output_api.SystemUse(sample),
        output_api.LogLine("a line"),
    ]
    assert idle.delivered() == [] and display._wake.is_set()


def test_numbers_beyond_the_limit_are_counted_once_and_messages_are_kept(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display_display, "MAX_WAITING", 2)
    for _ in range(5):
        idle.display.metrics(0, Metrics(1, {}))
    idle.display.status("kept")
    *kept, status, notice = idle.delivered()
    assert (len(kept), status) == (2, output_api.DriverStatus("kept"))
    assert notice == output_api.DriverNotice("3 metrics were not shown: the output was not read", "warning")
    assert idle.delivered() == []
    for _ in range(3):
        idle.display.metrics(0, Metrics(1, {}))
    assert idle.delivered()[-1] == output_api.DriverNotice(
        "1 metrics were not shown: the output was not read", "warning"
    )


def test_broken_display_takes_nothing(idle: Idle) -> None:
    idle.out.broken = "Broken pipe"
    idle.display.status("unseen")
    idle.display.metrics(0, Metrics(1, {}))
    assert idle.display.broken and idle.delivered() == []


def test_display_that_has_failed_is_broken(idle: Idle) -> None:
    assert not idle.display.broken
    idle.display._failed = "RuntimeError: boom"
    assert bool(idle.display.broken)


def test_logs_are_followed_from_where_they_were_and_stay_open_unless_there_are_many(idle: Idle) -> None:
    idle.display.expect(2, {1: 7})
    assert idle.delivered() == [output_api.WorldSize(2, {1: 7})]
    first, second = idle.display._tails.values()
    assert (first.path.name, first.offset, second.path.name, second.offset) == ("rank-0.log", 0, "rank-1.log", 7)
    idle.display.expect(64)
    idle.delivered()
    assert idle.display._tails[1] is second and len(idle.display._tails) == 64
    assert idle.display._tails[63]._keep_open
    idle.display.expect(1)
    idle.display.expect(65)
    idle.delivered()
    assert not idle.display._tails[64]._keep_open


def test_of_many_logs_those_are_read_that_grew_or_are_not_at_their_end(idle: Idle, clock: SimpleNamespace) -> None:
    display = idle.display
    display.expect(65)
    idle.delivered()
    assert display._logs_to_read() is display._tails
    clock.now += 2.0
    for rank in (9, 3, 9, 70):
        display.log_grew(rank)
    display.log_grew()
    display._unread = {1}
    assert list(display._logs_to_read()) == [1, 3, 9]
    assert list(display._logs_to_read()) == []
    clock.now += 0.1
    assert display._logs_to_read() is display._tails
    assert list(display._logs_to_read()) == []
    display._close = display_display._Close({}, output_api.Closing((), {}), 1.0)
    assert display._logs_to_read() is display._tails


def test_few_logs_are_all_read_each_time(idle: Idle) -> None:
    idle.display.expect(64)
    idle.delivered()
    assert idle.display._logs_to_read() is idle.display._logs_to_read() is idle.display._tails


def test_round_reads_a_piece_of_each_log_and_reads_on_where_there_is_more(
    idle: Idle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr("ddptrain.driver.display.log_tail.READ_BYTES", 8)
    monkeypatch.setattr(display_display, "READ_BYTES", 8)
    (tmp_path / "rank-0.log").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "rank-1.log").write_bytes(b"uno\n")
    idle.display.expect(3)
    idle.delivered()
    assert idle.display._read_logs() == 8
    assert idle.renderer.logged == [([0], ["one", "two"]), ([1], ["uno"])] and idle.display._unread == {0}
    assert idle.display._read_logs() == 6 and idle.display._unread == set()
    assert idle.renderer.logged[2:] == [([0], ["three"])] and idle.display._read_logs() == 0
    assert idle.display._moved() == 18
    idle.out.sent_bytes, idle.err.sent_bytes = 100, 1000
    assert idle.display._moved() == 1118


def test_bar_of_rank_0_stands_for_the_bars_of_a_group(tmp_path: Path, clock: SimpleNamespace) -> None:
    idle = Idle(tmp_path, groups_ranks=True)
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.log").write_bytes(b"\r5%")
    for world_size, ranks in ((16, [0, 1]), (17, [0])):
        idle.display.expect(world_size)
        idle.delivered()
        assert (idle.display._grouper is not None) is (world_size == 17)
        for tail in idle.display._tails.values():
            tail._shown, tail._due_s = "", 0.0
        idle.display._read_logs()
        clock.now += 1.0
        idle.renderer.told.clear()
        idle.display._read_logs()
        assert idle.renderer.told == [output_api.RedrawnLine(rank, "5%") for rank in ranks]
        assert {0, 1} <= idle.display._unread


def test_lines_of_a_group_are_held_back_until_they_are_due(tmp_path: Path, clock: SimpleNamespace) -> None:
    idle = Idle(tmp_path, groups_ranks=True)
    idle.display.expect(17)
    idle.display._deliver()
    idle.display._show_lines(3, [RankLine("one")])
    assert idle.renderer.logged == []
    idle.display._pass_on(output_api.DriverStatus("s"))
    assert idle.renderer.logged == []
    idle.display._pass_on(output_api.DriverNotice("failed"))
    assert idle.renderer.logged == [([3], ["one"])]


def test_last_line_and_what_is_missing_of_a_log_are_told(idle: Idle, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"last")
    (tmp_path / "rank-1.log").write_bytes(b"")
    idle.display.expect(2)
    idle.delivered().clear()
    idle.display._set_ends({0: 10})
    idle.display._set_ends({0: 11, 1: 11})
    idle.display._read_logs()
    assert not idle.display._is_drained() and [tail.end for tail in idle.display._tails.values()] == [10, 0]
    for rank, tail in idle.display._tails.items():
        idle.display._finish_log(rank, tail)
    assert idle.renderer.logged == [([0], ["last"])]
    text = f"{tmp_path / 'rank-0.log'} has 4 of 10 bytes: the rest did not arrive in time"
    missing = output_api.DriverNotice(text, "warning")
    assert idle.renderer.told == [output_api.RedrawnLine(0, ""), missing, output_api.RedrawnLine(1, "")]
    idle.display._tails[0].offset = 10
    assert idle.display._is_drained()
    idle.display.status("more")
    assert not idle.display._is_drained()


def test_pause_is_short_once_the_display_is_closed(idle: Idle, clock: SimpleNamespace) -> None:
    waits: list[float] = []
    idle.display._wake = SimpleNamespace(wait=waits.append, clear=lambda: waits.append(-1.0))  # type: ignore[assignment]
    idle.display._pause()
    assert (clock.slept, waits) == ([0.02], [0.1, -1.0])
    idle.display._close = display_display._Close({}, output_api.Closing((), {}), 1.0)
    idle.display._pause()
    assert (clock.slept, waits[2:]) == ([0.02], [0.02, -1.0])


class Waiting:
    """A thread that is joined: each wait takes its time and moves some bytes; it ends with the last one."""

    def __init__(self, idle: Idle, clock: SimpleNamespace, *waits: tuple[float, int]) -> None:
        self.idle, self.clock, self.waits = idle, clock, list(waits)
        self.limits: list[float] = []

    def is_alive(self) -> bool:
        return bool(self.waits)

    def join(self, limit_s: float) -> None:
        self.limits.append(limit_s)
        if self.waits:
            seconds, moved = self.waits.pop(0)
            self.clock.now += seconds
            self.idle.out.sent_bytes += moved


def test_thread_is_waited_for_as_long_as_anything_moves(idle: Idle, clock: SimpleNamespace) -> None:
    thread = Waiting(idle, clock, (5.9, 0), (0.1, 1), (6.0, 0), (5.0, 1), (6.0, 0))
    idle.display._thread = thread  # type: ignore[assignment]
    idle.display._join(5.0)
    assert not idle.aborted.is_set() and idle.err.last == [] and thread.limits == [0.1] * 5


def test_thread_that_stands_still_is_given_up(idle: Idle, clock: SimpleNamespace, tmp_path: Path) -> None:
    thread = Waiting(idle, clock, (6.1, 0), (1.0, 0), (1.0, 0))
    idle.display._thread = thread  # type: ignore[assignment]
    idle.display._join(5.0)
    assert idle.aborted.is_set() and thread.limits == [0.1, 0.2]
    text = f"ddptrain: nobody has read the output for 5 s; the rest is in {tmp_path}\n"
    assert idle.err.last == [(text, 0.2)]


def test_second_interrupt_ends_the_wait(idle: Idle) -> None:
    def interrupted(limit_s: float) -> None:
        raise KeyboardInterrupt

    idle.display._thread = SimpleNamespace(is_alive=lambda: True, join=interrupted)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        idle.display.close()
    assert idle.aborted.is_set()


@pytest.mark.parametrize(("broken", "last"), [("", []), ("Broken pipe", [("one\ntwo\n", 0.2)])])
def test_summary_goes_to_stderr_where_stdout_is_broken(idle: Idle, broken: str, last: list[tuple[str, float]]) -> None:
    idle.display._thread = SimpleNamespace(is_alive=lambda: False)  # type: ignore[assignment]
    idle.out.broken = broken
    idle.display.close({0: 3}, ["one", "two"], {"a": 1})
    assert idle.err.last == last
    close = display_display._Close({0: 3}, output_api.Closing(("one", "two"), {"a": 1}), 10.0)
    assert idle.display._close == close and idle.display._wake.is_set()


@pytest.mark.parametrize("aborted", [True, False])
def test_end_is_told_unless_the_output_was_given_up(idle: Idle, aborted: bool) -> None:
    message = output_api.Closing(("end",), {})
    idle.display._finish()
    assert idle.renderer.told == []
    idle.display._close = display_display._Close({}, message, 1.0)
    if aborted:
        idle.aborted.set()
    idle.display._finish()
    assert idle.renderer.told == ([] if aborted else [message]) and idle.err.last == []


def test_late_logs_are_waited_for_until_nothing_comes_for_the_deadline(
    idle: Idle, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"one\n")
    steps = iter([(3.0, b"two\n"), (3.0, b""), (2.0, b""), (0.1, b"")])
    pauses: list[float] = []

    def pause() -> None:
        seconds, data = next(steps)
        clock.now += seconds
        pauses.append(clock.now)
        with path.open("ab") as file:
            file.write(data)

    monkeypatch.setattr(idle.display, "_pause", pause)
    idle.display.expect(1)
    idle.display._close = display_display._Close({0: 100}, output_api.Closing((), {}), 5.0)
    idle.display._follow()
    assert pauses == [1003.0, 1006.0, 1008.0, 1008.1]  # the last bytes were read at 1003: 5 s are over after 1008
    assert idle.renderer.logged == [([0], ["one"]), ([0], ["two"])]
    assert idle.renderer.told[1:] == [f"refresh {now:g}" for now in (1000.0, *pauses)]


@pytest.mark.parametrize(
    ("mode", "environ", "kind", "redraw_every_s"),
    [
        ("auto", {}, "PlainRenderer", 1.0),
        ("live", {}, "PlainRenderer", 1.0),
        ("json", {}, "JsonRenderer", 1.0),
    ],
)
def test_renderer_fits_the_mode(
    tmp_path: Path, mode: str, environ: dict[str, str], kind: str, redraw_every_s: float
) -> None:
    with open_display(mode, tmp_path, "r", io.StringIO(), io.StringIO(), environ) as display:
        assert type(display._renderer).__name__ == kind and display._renderer.redraw_every_s == redraw_every_s
        assert display._groups_ranks is (mode != "json") and display._tails == {}


def test_live_display_draws_on_a_terminal_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def live(*given: Any, **options: Any) -> Renderer:
        made.append((given, options))
        return Renderer()

    monkeypatch.setattr(terminal, "choose_mode", lambda mode, is_terminal, environ: "live")
    monkeypatch.setattr(display_display, "LiveRenderer", live)
    environ = {"COLUMNS": "33", "LINES": "11"}
    with open_display("auto", tmp_path, "r", io.StringIO(), io.StringIO(), environ, all_ranks=True) as display:
        assert not display._groups_ranks
    (((_, _, size, colour, run_id), options),) = made
    assert (size(), colour, run_id, options) == (
        (33, 11),
        False,
        "r",
        {"all_ranks": True, "bars": None, "elapsed_s": 0.0},
    )
