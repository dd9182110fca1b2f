"""The whole display, into pipes: everything is shown, nobody waits, nothing is left behind."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from ddptrain import log
from ddptrain.driver.display import Display
from ddptrain.protocol.events import Metrics, Progress
from tests.support.command import wait_until
from tests.unit.driver.display.live_events import expect, numbers


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "ddptrain-display":
            thread.join(30)
            assert not thread.is_alive()


class Shown:
    """A display into two files, and what stands in them."""

    def __init__(self, folder: Path, mode: str, ranks: int = 2, *, all_ranks: bool = False, **environ: str) -> None:
        self.logs = folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self._paths = folder / "out", folder / "err"
        self._files = [path.open("w", encoding="utf-8") for path in self._paths]
        files = self._files[0], self._files[1]
        self.display = Display(mode, self.logs, "run-1", *files, environ, all_ranks=all_ranks)
        self.display.on_event(expect(ranks))

    def print(self, rank: int, data: bytes) -> None:
        with (self.logs / f"rank-{rank}.log").open("ab") as log:
            log.write(data)
        self.display.on_event({"event": "log_grew", "rank": 0})

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.out.splitlines()]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.out + self.err, text)

    def close(self, **how: Any) -> None:
        self.display.close(**how)
        for file in self._files:
            file.close()


def stuck_pipe() -> tuple[int, TextIO]:
    """A pipe that nobody reads, full to the brim."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
            return reader, os.fdopen(writer, "w")


def test_plain_shows_lines_as_they_are_printed_and_a_partial_one_at_the_end(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "auto")
    shown.print(0, b"one\n\x1b[31mred\n")
    shown.wait_for("[rank 0] one\n[rank 0] \x1b[31mred\n")
    shown.print(1, b"two\nlast words")
    shown.wait_for("[rank 1] two\n")
    assert "last" not in shown.out
    shown.close(summary=["run-1 failed", "see logs"])
    assert shown.out.endswith("[rank 1] last words\nrun-1 failed\nsee logs\n")
    assert shown.err == ""


def test_plain_keeps_its_own_words_to_stderr(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "plain")
    shown.display.status("starting 2 ranks")
    shown.display.status("starting 2 ranks")
    shown.display.notice("one\ntwo", "warning")
    shown.display.on_event({"event": "x"})
    shown.display.on_event({"event": "rank_started", "rank": 0, "host": "node", "pid": 1})
    shown.close()
    assert shown.out == ""
    assert shown.err == "ddptrain: starting 2 ranks\nddptrain: one\nddptrain: two\n"


def test_json_objects_of_a_stage_have_its_name(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    (tmp_path / "rank-0.log").write_bytes(b"one\n")
    with Display("json", tmp_path, "run-1", stdout=out, stderr=err, environ={}, stage="evaluate") as display:
        display.on_event(expect(1))
        display.notice("begun")
        display.close(last_event={"event": "run_finished"})
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {each["event"] for each in found} == {"notice", "log", "run_finished"}
    assert all(each["stage"] == "evaluate" for each in found)


def test_progress_bar_of_a_rank_is_shown_now_and_then_and_as_it_ends(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "plain", ranks=1)
    shown.print(0, b"\r 1%\r 2%")
    shown.wait_for("[rank 0]  2%\n")
    shown.print(0, b"\r99%\r100%\n")
    shown.close()
    assert shown.out == "[rank 0]  2%\n[rank 0] 100%\n"


def test_json_is_one_object_a_line_and_the_last_is_the_end(tmp_path: Path) -> None:
    began_s = time.monotonic()
    shown = Shown(tmp_path, "json")
    display = shown.display
    display.on_event({"event": "rank_started", "rank": 1, "host": "node", "pid": 42})
    display.on_event(numbers(1, Metrics(5 * 10**9, {"loss": math.nan, "acc": 0.5}, step=3, epoch=1.0)))
    for done in range(100):
        display.on_event(numbers(0, Progress(done, float(done), 99.0, "samples")))
    display.notice("Zoë\nsaved", "warning")
    display.status("stopping")
    display.on_event({"event": "checkpoint", "step": 3, "loss": math.inf})
    display.on_event({"event": "rank_ended", "rank": 1, "ok": False})
    shown.print(1, b'say "\xc3\xab"\x00\nlast')
    end = {"event": "run_finished", "exit_code": 1, "failure": None}
    shown.close(summary=["not here"], last_event=end)
    took_s = time.monotonic() - began_s
    objects = shown.objects
    by_event = {obj["event"]: obj for obj in objects}
    assert objects[-1] == end
    assert by_event["metrics"]["values"] == {"loss": None, "acc": 0.5}
    assert (by_event["metrics"]["step"], by_event["metrics"]["epoch"], by_event["metrics"]["rank"]) == (
        3,
        1.0,
        1,
    )
    assert by_event["checkpoint"] == {"event": "checkpoint", "step": 3, "loss": None}
    assert (by_event["notice"]["level"], by_event["notice"]["message"]) == ("warning", "Zoë\nsaved")
    assert by_event["rank_started"]["host"] == "node" and by_event["rank_ended"]["ok"] is False
    logs = [(obj["rank"], obj["line"], obj.get("partial")) for obj in objects if obj["event"] == "log"]
    assert logs == [(1, 'say "ë"\x00', None), (1, "last", True)]
    progress = [obj["done"] for obj in objects if obj["event"] == "progress"]
    assert progress[-1] == 99.0 and len(progress) <= 2 + took_s  # one a second
    assert shown.err == ""


def test_reader_who_leaves_silences_the_display_and_stderr_says_so_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    (tmp_path / "rank-0.log").write_bytes(b"one\n")
    with os.fdopen(writer, "w") as out, (tmp_path / "err").open("w") as err:
        display = Display("plain", tmp_path, "run-1", out, err, {})
        display.on_event(expect(1))
        wait_until(lambda: display.broken, "the broken pipe")
        for _ in range(10):
            display.notice("unseen")
            display.on_event(numbers(0, Metrics(0, {})))
        display.close(summary=["the end"])
    said = (tmp_path / "err").read_text()
    assert said.count("stdout can't be written any more (Broken pipe)") == 1
    assert said.endswith("the end\n") and "unseen" not in said


def test_stuck_reader_never_delays_the_driver_and_is_given_up_at_the_end(tmp_path: Path) -> None:
    reader, out = stuck_pipe()
    (tmp_path / "rank-0.log").write_bytes(b"one\n" * 100_000)
    with out, (tmp_path / "err").open("w") as err:
        display = Display("json", tmp_path, "run-1", out, err, {})
        display.on_event(expect(1))
        time.sleep(0.05)
        started_s = time.monotonic()
        for _ in range(60_000):
            display.on_event(numbers(0, Metrics(0, {"loss": 1.0})))
            display.on_event({"event": "log_grew", "rank": 0})
        assert time.monotonic() - started_s < 40
        display.close(last_event={"event": "run_finished"}, deadline_s=0.1)
        assert time.monotonic() - started_s < 80
    os.close(reader)
    assert "nobody has read the output for 0.1 s" in (tmp_path / "err").read_text()


HEAD = """
import sys
from pathlib import Path
from ddptrain.driver.display import Display
display = Display("plain", Path(sys.argv[1]), "run-1")
display.on_event({"event": "ranks", "count": 1, "offsets": {}, "hidden": ()})
display.close(summary=["end"])
print("later")
"""


def test_plain_display_imports_neither_rich_nor_torch_nor_dask(tmp_path: Path) -> None:
    code = HEAD + "print([name for name in ('rich', 'torch', 'dask') if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, text=True)
    assert output.stdout == "end\nlater\n[]\n"


MEMORY = """
import resource, sys
from pathlib import Path
from ddptrain.driver.display import Display
def peak_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
display = Display("plain", Path(sys.argv[1]) / "none", "run-1")
display.on_event({"event": "ranks", "count": 1, "offsets": {}, "hidden": ()})
display.close()
before = peak_kb()
display = Display("plain", Path(sys.argv[1]), "run-1")
display.on_event({"event": "ranks", "count": 2, "offsets": {}, "hidden": ()})
display.close()
print(peak_kb() - before, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("line", "count"),
    [(b"x" * 9_999_999 + b"\n", 1), (b"step 1 loss 0.5\n", 100_000), (b"\n", 300_000), (b"\r1%", 300_000)],
)
def test_memory_stays_flat_however_much_comes_at_once(tmp_path: Path, line: bytes, count: int) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.log").write_bytes(line * count)
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True, text=True)
    assert int(done.stderr) < 10_000  # kB


def test_from_17_ranks_on_rank_0_is_shown_and_whatever_differs(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "plain", ranks=17)
    for rank in range(17):
        shown.print(rank, b"epoch 1/20\n")
    shown.wait_for("epoch 1/20")
    for rank in range(17):
        shown.print(rank, b"of rank %d\nepoch 2/20\nlast words" % rank)
    shown.close(summary=["the end"])
    assert shown.out.startswith("[rank 0] epoch 1/20\n")
    assert shown.out.count("epoch 1/20") == shown.out.count("last words") == 1
    assert shown.out.endswith("the end\n")
    assert sorted(line for line in shown.out.splitlines() if "of rank" in line) == sorted(
        f"[rank {rank}] of rank {rank}" for rank in range(17)
    )


@pytest.mark.parametrize(("mode", "ranks", "all_ranks"), [("plain", 16, False), ("plain", 17, True)])
def test_small_runs_and_all_ranks_show_each_line_of_each_rank(
    tmp_path: Path, mode: str, ranks: int, all_ranks: bool
) -> None:
    shown = Shown(tmp_path, mode, ranks, all_ranks=all_ranks)
    for rank in range(ranks):
        shown.print(rank, b"epoch 1/20\n")
    shown.close()
    assert sorted(shown.out.splitlines()) == sorted(f"[rank {rank}] epoch 1/20" for rank in range(ranks))


def test_json_is_never_grouped(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "json", ranks=20)
    for rank in range(20):
        shown.print(rank, b"epoch 1/20\n")
    shown.close()
    lines = sorted((line["rank"], line["line"]) for line in shown.objects)  # in any order
    assert lines == [(rank, "epoch 1/20") for rank in range(20)]


def test_restart_with_fewer_ranks_shows_what_the_others_had_printed(tmp_path: Path) -> None:
    path = tmp_path / "all"
    with path.open("w") as file:
        display = Display("plain", tmp_path, "run-1", file, file, {})
        display.on_event(expect(4))
        for rank in range(4):
            (tmp_path / f"rank-{rank}.log").write_text(f"of {rank}\nthe end")
        display.on_event(expect(2))
        display.close()
        assert not display.broken
    expected = [line for rank in range(4) for line in (f"[rank {rank}] of {rank}", f"[rank {rank}] the end")]
    assert sorted(path.read_text().splitlines()) == sorted(expected)


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_own_log_goes_to_stderr(tmp_path: Path, mode: str) -> None:
    try:
        log.to_stderr("info")
        shown = Shown(tmp_path, mode)
        log.Log("ddptrain.driver").info("decided", rank=1)
        shown.wait_for("INFO driver rank=1 decided\n")
        shown.close()
    finally:
        log.detach(log._stderr)
    assert "decided" not in shown.out and shown.err.count("decided") == 1


def test_of_many_logs_only_those_that_grew_are_read_and_all_at_the_end(tmp_path: Path) -> None:
    shown = Shown(tmp_path, "json", ranks=100)
    time.sleep(0.1)  # all have been looked at once
    with (shown.logs / "rank-7.log").open("ab") as log, (shown.logs / "rank-9.log").open("ab") as silent:
        log.write(b"seven\n")
        silent.write(b"nine\n")
    shown.display.on_event({"event": "log_grew", "rank": 7})
    deadline = time.monotonic() + 30
    while "seven" not in shown.out and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "seven" in shown.out
    shown.close()
    assert [(line["rank"], line["line"]) for line in shown.objects if line["event"] == "log"] in (
        [(7, "seven"), (9, "nine")],
        [(9, "nine"), (7, "seven")],  # if two seconds had passed, all were looked at
    )
