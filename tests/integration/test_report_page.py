"""The report file and the pages of `ddptrain ui` in a real browser: they work, load nothing; hostile runs are inert."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.browser import CHROMIUM, Browser
from tests.support.hostile_run import ATTACKS, write_hostile_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

STEPS = 2000
CHANGE = (
    "(() => {{ const e = document.querySelector('form.controls').elements; {0}; "
    "e.x.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
)
LABEL = "document.querySelector('.chart').getAttribute('aria-label')"
SPOKEN = "document.querySelector('.chart [aria-live]').textContent"
CAN_RESET = "!document.querySelector('[name=reset]').disabled"
NARROW = "document.documentElement.scrollWidth"
SHOWN_ROWS = "[...document.querySelectorAll('#list tbody tr')].filter((row) => !row.hidden).length"
RUNNING = "pets-20260102-000000-0001"
IDS = ("toy-20260101-000000-0001", "toy-20260101-000000-0002")
TRACE = """Traceback (most recent call last):
  File "/home/me/work.py", line 11, in train
    check(data)
ValueError: the data have ended
"""


def write_run(runs: Path, run_id: str, factor: float, steps: int = STEPS, **record: Any) -> None:
    folder = runs / run_id
    folder.mkdir(parents=True)
    about = {"run_id": run_id, "status": "succeeded", "started_at": "2026-01-01T00:00:00Z", "duration_s": factor}
    (folder / "run.json").write_text(json.dumps(about | record))
    (folder / "config.yaml").write_text(f"workload: petnames\nname: toy\nparams: {{learning_rate: {factor}}}\n")
    start = {"time_s": 1767225600.0}
    lines = [
        {**start, "step": step, "rank": rank, "val/loss": factor * math.exp(-step / 500) + rank / 10}
        for step in range(steps)
        for rank in range(2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sweep(folder: Path) -> None:
    """A sweep of four trials with a parameter whose name is an attack."""
    folder.mkdir(parents=True)
    params = [{"params.lr": 10.0**-at, ATTACKS[1]: ATTACKS[at % 2]} for at in range(1, 5)]
    trials = [{"number": at, "state": "complete", "value": at / 10, "params": own} for at, own in enumerate(params, 1)]
    choices = {"kind": "choice", "values": ATTACKS[:2]}
    space = {"params.lr": {"kind": "log", "low": 1e-4, "high": 0.1}, ATTACKS[1]: choices}
    sweep = {"format": 1, "sweep_id": folder.name, "name": "s", "source": "", "started_at": "", "status": "succeeded"}
    sweep |= {"metric": "loss", "mode": "min", "best": 1, "space": space, "trials": trials}
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name, "kind": "sweep", "status": "succeeded"}))
    (folder / "sweep.json").write_text(json.dumps(sweep))


def in_browser(folder: Path, visit: Callable[[Browser], Awaitable[Any]], origin: str = "") -> None:
    """Run `visit` with a browser; the pages must have no problems and ask nobody but `origin`."""

    async def main() -> None:
        async with Browser.opened(folder / "profile") as browser:
            await visit(browser)
            assert browser.problems == []
            assert [url for url in browser.requests if not (origin and url.startswith(origin))] == []

    asyncio.run(main())


async def until(browser: Browser, condition: str) -> None:
    """Wait until an expression in the page is true."""
    deadline = time.monotonic() + 100
    while not await browser.run(condition):
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.1)


@pytest.fixture
def ui(tmp_path: Path) -> Iterator[Callable[[], str]]:
    cli = Cli(tmp_path)

    def start() -> str:
        running = cli.start("ui", "--no-browser")
        running.wait_for("(Ctrl-C ends this)")
        found = re.search(r"http://\S+", running.stdout)
        assert found
        return found[0]

    yield start
    for running in cli.started:
        running.kill_group()


def test_curves_and_tables_of_a_report(tmp_path: Path, run_cli: Cli) -> None:
    for run_id, factor in zip(IDS, (3.0, 1.0), strict=True):
        write_run(tmp_path / "runs", run_id, factor)
    assert run_cli("results", "report", *IDS, "-o", "report.html").rc == 0

    async def visit(browser: Browser) -> None:
        await browser.open((tmp_path / "report.html").as_uri(), 1400)
        assert (await browser.run(LABEL)).startswith(f"val/loss; last values: {IDS[0]} 0.10506, {IDS[1]} 0.0683")
        place = "(({x, y}) => [x, y])(document.querySelector('.plot .u-over').getBoundingClientRect())"
        x, y = await browser.run(place)
        await browser.drag(x + 100, y + 80, x + 200, y + 80)
        assert await browser.run(CAN_RESET)
        await browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + 150, y=y + 80)
        await until(browser, "!document.querySelector('.tip').hidden")
        await browser.run("document.querySelector('.chart').focus()")
        await browser.key("End")
        assert 0 < float((await browser.run(SPOKEN)).split(":")[0].removeprefix("step ").replace(",", "")) < STEPS / 2
        await browser.key("0")
        assert not await browser.run(CAN_RESET)
        await browser.key("Home")
        assert (await browser.run(SPOKEN)).startswith("step 0: ")

        await browser.run(CHANGE.format("e.rank.value = 'all'; e.weight.value = 0.9; e.log.checked = true"))
        assert f"{IDS[1]}, rank 1 0.1" in await browser.run(LABEL)
        await browser.run(CHANGE.format("document.querySelector('[name=run]').click(); e.rank.value = 'mean'"))
        assert IDS[0] not in await browser.run(LABEL)

        first_run = "document.querySelector('#runs tbody th').textContent"
        assert await browser.run(first_run) == IDS[0]
        await browser.run("document.querySelectorAll('#runs .sort')[3].click()")
        assert await browser.run("document.querySelectorAll('#runs th')[3].getAttribute('aria-sort')") == "ascending"
        assert await browser.run(first_run) == IDS[1]  # it took 1 s, the other one 3 s

        await browser.open((tmp_path / "report.html").as_uri(), 390, dark=True)
        assert await browser.run(NARROW) == 390
        assert await browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"

    in_browser(tmp_path, visit)


def test_hostile_run_and_sweep_change_nothing(tmp_path: Path, run_cli: Cli, ui: Callable[[], str]) -> None:
    write_hostile_run(tmp_path / "runs/evil")
    write_sweep(tmp_path / "runs/sweep-1")
    assert run_cli("results", "report", "evil", "-o", "report.html").rc == 0
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    url = ui()

    async def visit(browser: Browser) -> None:
        for page, title in (
            ((tmp_path / "report.html").as_uri(), "Run evil"),
            (f"{url}?run=evil", "Run evil"),
            (f"{url}?sweep=sweep-1", "Sweep sweep-1"),
            (url, "Runs"),
        ):
            await browser.open(page, 390)
            await browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            assert await browser.run(NARROW) == 390
            assert title == "Runs" or "<script>" in await browser.run("document.body.innerText")  # the text itself
            assert await browser.run("document.title") == title

    in_browser(tmp_path, visit, url)


def test_pages_of_a_folder(tmp_path: Path, ui: Callable[[], str]) -> None:
    runs = tmp_path / "runs"
    for at in range(1000):
        status = ("succeeded", "failed", "cancelled")[at % 3]
        cause = (
            {"failure": {"rank": 1, "host": "h", "type": "ValueError", "message": "wrong shape"}} if at % 3 == 1 else {}
        )
        write_run(runs, f"toy-20260101-000000-{at:04x}", 1.0 + at, steps=2, status=status, **cause)
    write_sweep(runs / "sweep-1")
    write_run(runs, RUNNING, 1.0, steps=5, status="running", duration_s=None)
    lock = (runs / RUNNING / "run.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # as its driver holds it
    url = ui()

    async def visit(browser: Browser) -> None:
        await browser.open(url, 1400)
        assert await browser.run(SHOWN_ROWS) == 1001
        await browser.run("document.getElementById('filter').focus()")
        for key in "running":
            await browser.send("Input.insertText", text=key)
        assert await browser.run(SHOWN_ROWS) == 1
        await browser.run("document.querySelector('#list tbody tr:not([hidden]) a').click()")
        await until(browser, f"document.title === 'Run {RUNNING}'")
        assert f"val/loss {math.exp(-4 / 500) + 0.05:.3f}" in await browser.run(LABEL)
        await browser.run("document.querySelector('details.long').open = true")
        with (runs / RUNNING / "metrics.jsonl").open("a") as file:
            file.write('{"time_s": 1767225600, "step": 5, "rank": 0, "val/loss": 0.25}\n')
        await until(browser, f"{LABEL}.includes('val/loss 0.25')")
        failure = {"rank": 1, "host": "h", "type": "ValueError", "message": "the data have ended", "traceback": TRACE}
        record = {"run_id": RUNNING, "status": "failed", "failure": failure}
        (runs / "new.json").write_text(json.dumps(record))
        (runs / "new.json").rename(runs / RUNNING / "run.json")
        await until(browser, "document.querySelector('.status').textContent === 'failed'")
        assert "ValueError: the data have ended" in await browser.run("document.querySelector('.failure').innerText")
        assert "work.py:11" in await browser.run("document.querySelector('.frames').innerText")
        assert await browser.run("document.querySelector('details.long').open")  # what the user has opened stays open

        await browser.open(url, 390, dark=True)
        assert await browser.run(NARROW) == 390
        boxes = "document.querySelectorAll('#list tbody input')"
        assert await browser.run("document.getElementById('compare').disabled")
        await browser.run(f"{boxes}[1].click(); {boxes}[2].click()")
        await browser.run("document.getElementById('compare').click()")
        await until(browser, "document.title === '2 runs'")
        await until(browser, "!!document.querySelector('.chart')")
        assert (await browser.run(LABEL)).startswith("val/loss; last values: toy-20260101-000000-")
        assert await browser.run("document.querySelectorAll('#runs tbody tr').length") == 2

        await browser.open(f"{url}?sweep=sweep-1", 1400)
        assert await browser.run("document.querySelectorAll('.slices svg').length") == 2
        best = "document.querySelector('.dot.best title').textContent"
        assert await browser.run(best) == "trial 1, complete: 0.1, loss 0.1"
        await browser.open(f"{url}?models", 1400)
        assert await browser.run("document.title") == "Models"

    with lock:
        in_browser(tmp_path, visit, url)
