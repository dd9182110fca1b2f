"""The live display on real terminals: a pseudo-terminal, and tmux where there is one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddptrain.driver.display import Display
from ddptrain.protocol.events import Metrics, Progress
from tests.unit.driver.display.live_events import expect, numbers

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal and all that has been written to it."""

    def __init__(self, columns: int = 100, rows: int = 24) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self._data = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._data += data
        except OSError:
            pass  # the other side is closed: how a pseudo-terminal ends

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")  # its last character may have come in part

    def wait_for(self, text: str) -> None:
        end_s = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < end_s, f"waited in vain for {text!r} in {self.text!r}"
            time.sleep(0.01)

    def close(self) -> None:
        self.file.close()
        self._reader.join(60)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def live(terminal: Terminal, logs: Path, ranks: int = 2, **environ: str) -> Display:
    display = Display("auto", logs, "run-1", terminal.file, terminal.file, {"TERM": "xterm", **environ})
    display.on_event(expect(ranks))
    return display


def train(display: Display) -> None:
    display.status("training")
    for rank in (0, 1):
        display.on_event({"event": "rank_started", "rank": rank, "host": "node", "pid": 10 + rank})
        for second in (0, 1):
            display.on_event(numbers(rank, Progress(second * 10**9, 50.0 * second, 100.0, "samples")))
        display.on_event(numbers(rank, Metrics(0, {"train/loss": 1.25})))


def test_bars_stand_below_the_logs_and_the_summary_below_the_bars(terminal: Terminal, tmp_path: Path) -> None:
    display = live(terminal, tmp_path)
    train(display)
    (tmp_path / "rank-1.log").write_bytes(b"hello\nlast words")
    terminal.wait_for("hello")
    terminal.wait_for("50%")
    display.notice("checkpoint step-12 saved", "warning")
    display.on_event({"event": "rank_ended", "rank": 0, "ok": True})
    display.on_event({"event": "rank_ended", "rank": 1, "ok": True})
    display.close(summary=["run-1 succeeded"])
    terminal.wait_for("run-1 succeeded\r\n")
    text = terminal.text
    last_frame = ESCAPE.sub("", text[text.rindex("\x1b[2K") :])
    shown = ["[rank 1]", "2 ranks", "0:00 · r", "run-1 su", ""]
    assert [line[:8].strip() for line in last_frame.split("\r\n")][-len(shown) :] == shown
    assert "\x1b[33mddptrain: checkpoint step-12 saved\x1b[0m" in text
    assert "last words" in text
    assert "\x1b[?" not in text  # no mode was changed, so none is left changed
    assert "loss 1.250" in last_frame and "100 samples/s" in last_frame and "done" in last_frame


def test_no_color_leaves_none(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"\x1b[31mred\x1b[0m\n")
    display = live(terminal, tmp_path, NO_COLOR="1")
    train(display)
    display.notice("careful", "error")
    display.close(summary=["the end"])
    terminal.wait_for("the end")
    assert "[rank 0] red\r\n" in terminal.text
    assert re.search(r"\x1b\[[0-9;]*m", terminal.text) is None


def test_nothing_is_written_while_nothing_changes(terminal: Terminal, tmp_path: Path) -> None:
    began_s = time.monotonic()
    display = live(terminal, tmp_path)
    train(display)
    terminal.wait_for("50%")
    time.sleep(0.5)
    frames = terminal.text.count("\r\x1b[2K")
    took_s = time.monotonic() - began_s
    display.close()
    assert frames <= 4 + int(took_s)  # one a second for the clock, and a few while training began


def test_terminal_that_goes_away_silences_the_display(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    os.close(master)
    with os.fdopen(slave, "w") as file, (tmp_path / "err").open("w") as err:
        display = Display("live", tmp_path, "run-1", file, err, {})
        display.on_event(expect(1))
        display.close(summary=["end"])
        assert display.broken
    assert (tmp_path / "err").read_text().endswith("end\n")


def failing_rows(status: str, elapsed_s: float, height: int) -> list[str]:
    raise RuntimeError("boom")


def test_fault_of_the_display_itself_does_not_stop_the_run(terminal: Terminal, tmp_path: Path) -> None:
    files = terminal.file, terminal.file
    display = Display("auto", tmp_path, "run-1", *files, {"TERM": "xterm"}, rows=failing_rows)
    terminal.wait_for("the display failed (RuntimeError: boom); the run continues")
    assert display.broken
    display.close(summary=["the end"])
    terminal.wait_for("the end")


DEMO = """
import sys, time
from pathlib import Path
from ddptrain.driver.display import Display
from ddptrain.protocol.events import Metrics, Progress
from tests.unit.driver.display.live_events import expect, numbers
logs = Path(sys.argv[1])
ranks = int(sys.argv[2])
display = Display("auto", logs, "run-1", all_ranks="--all-ranks" in sys.argv)
display.on_event(expect(ranks))
display.status("training")
for rank in range(ranks):
    display.on_event({"event": "rank_started", "rank": rank, "host": "node", "pid": 10 + rank})
    for second in (0, 1):
        display.on_event(numbers(rank, Progress(second * 10**9, 50.0 * second, 100.0, "samples")))
while not (logs / "end").exists():
    time.sleep(0.02)
display.close(summary=["SUMMARY"])
"""


class Tmux:
    """A tmux server of its own with one window."""

    def __init__(self, folder: Path) -> None:
        self._base = ["tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        self._environ = {key: value for key, value in os.environ.items() if key not in ("CI", "TMUX", "NO_COLOR")}

    def call(self, *words: str) -> str:
        command = [*self._base, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=self._environ).stdout

    def screen(self) -> list[str]:
        return self.call("capture-pane", "-p", "-S", "-").rstrip("\n").split("\n")

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        end_s = time.monotonic() + 60
        while not condition(screen := self.screen()):
            assert time.monotonic() < end_s, "\n".join(screen)
            time.sleep(0.05)
        return screen


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    tmux = Tmux(tmp_path)
    tmux.call("new-session", "-d", "-x", "100", "-y", "20", "sh")
    yield tmux
    tmux.call("kill-server")


def demo(tmux: Tmux, folder: Path, ranks: int = 2, *options: str) -> None:
    (folder / "demo.py").write_text(DEMO)
    python_path = str(Path(__file__).parents[4])
    words = [
        "env",
        f"PYTHONPATH={python_path}",
        sys.executable,
        str(folder / "demo.py"),
        str(folder),
        str(ranks),
        *options,
    ]
    tmux.call("send-keys", f"PS1='$ '; clear; {shlex.join(words)}", "Enter")


def shape(screen: list[str]) -> list[str]:
    """The first word or two of each line that is the display's, from its first log line on."""
    kinds = re.compile(r"^(\[rank \d\] \w+|rank \d|training|SUMMARY)")
    return [match[0] for line in screen if (match := kinds.match(line))]


def test_real_terminal_shows_logs_bars_and_summary(tmux: Tmux, tmp_path: Path) -> None:
    demo(tmux, tmp_path, 2, "--all-ranks")
    tmux.wait_for(lambda screen: shape(screen) == ["rank 0", "rank 1", "training"] and "50%" in screen[-2])
    (tmp_path / "rank-0.log").write_bytes(b"one\ntwo\n")
    tmux.wait_for(lambda screen: shape(screen)[-5:] == ["[rank 0] one", "[rank 0] two", "rank 0", "rank 1", "training"])
    (tmp_path / "end").touch()
    screen = tmux.wait_for(lambda screen: screen[-1] == "$")
    assert shape(screen) == ["[rank 0] one", "[rank 0] two", "rank 0", "rank 1", "SUMMARY"]
    assert tmux.call("display-message", "-p", "#{cursor_flag}").strip() == "1"


def test_bars_stay_whole_when_the_terminal_is_resized(tmux: Tmux, tmp_path: Path) -> None:
    demo(tmux, tmp_path, 2, "--all-ranks")
    lines = [f"line{number}" for number in range(40)]
    (tmp_path / "rank-0.log").write_text("".join(f"{line}\n" for line in lines))
    expected = [*(f"[rank 0] {line}" for line in lines), "rank 0", "rank 1", "training"]
    tmux.wait_for(lambda screen: shape(screen) == expected and "50%" in screen[-2])
    for columns, rows in ((40, 20), (12, 20), (100, 20), (100, 8), (60, 30)):
        tmux.call("resize-window", "-x", str(columns), "-y", str(rows))
        time.sleep(0.3)  # a few frames at this size; should one be missed, the next size is drawn all the same
    (tmp_path / "end").touch()
    screen = tmux.wait_for(lambda screen: screen[-1] == "$")
    assert shape(screen) == [*expected[:-1], "SUMMARY"]
