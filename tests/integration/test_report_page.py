"""The report page in a real browser: controls work, nothing is loaded, and a hostile run directory changes nothing."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.browser import CHROMIUM, Browser
from tests.support.hostile_run import ATTACKS, MARK, write_hostile_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

STEPS = 2000
CHART_PLACE = "(({x, y}) => [x, y])(document.querySelector('.plot').getBoundingClientRect())"
FIRST_AXIS = (
    "(({x, y, width, height}) => [x + width / 2, y, height])(document.querySelector('.handle').getBoundingClientRect())"
)
SHOWN_TRIALS = (
    "[...document.querySelectorAll('[data-trial]')].filter((row) => !row.hidden).map((row) => row.dataset.trial)"
)
LAST_TICK = (
    "[...document.querySelectorAll('.panel .tick')]"
    ".filter((one) => one.getAttribute('text-anchor') === 'middle').at(-1).textContent"
)
CHANGE = (
    "(() => {{ const e = document.querySelector('form.controls').elements; {0}; "
    "e.x.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
)
IDS = ("toy-20260101-000000-0001", "toy-20260101-000000-0002")


def write_run(runs: Path, run_id: str, factor: float) -> None:
    folder = runs / run_id
    folder.mkdir(parents=True)
    record = {"run_id": run_id, "status": "succeeded", "started_at": "2026-01-01T00:00:00Z", "duration_s": factor}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(f"workload: petnames\nname: toy\nparams: {{learning_rate: {factor}}}\n")
    lines = [
        {
            "time_s": 1767225600 + step,
            "step": step,
            "rank": rank,
            "val/loss": factor * math.exp(-step / 500) + rank / 10,
        }
        for step in range(STEPS)
        for rank in range(2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def in_browser(folder: Path, visit: Callable[[Browser], Awaitable[Any]]) -> Any:
    """Run `visit` with a browser; the page must have no problems and ask for nothing."""

    async def main() -> Any:
        async with Browser.opened(folder / "profile") as browser:
            found = await visit(browser)
            assert (browser.problems, browser.requests) == ([], [])
            return found

    return asyncio.run(main())


def report(run_cli: Cli, *arguments: str) -> None:
    done = run_cli("results", "report", *arguments)
    assert done.rc == 0, done.stderr


def test_controls_of_the_curves_and_the_table(tmp_path: Path, run_cli: Cli) -> None:
    for run_id, factor in zip(IDS, (3.0, 1.0), strict=True):
        write_run(tmp_path / "runs", run_id, factor)
    report(run_cli, *IDS, "-o", "report.html")

    async def visit(browser: Browser) -> None:
        await browser.open((tmp_path / "report.html").as_uri(), 1400)
        lines = "document.querySelectorAll('.panel path.line').length"
        assert await browser.run(lines) == 2
        assert (await browser.run("document.querySelector('.chart').getAttribute('aria-label')")).startswith(
            "val/loss; last"
        )

        x, y = await browser.run(CHART_PLACE)
        await browser.drag(x + 100, y + 80, x + 200, y + 80)
        assert float((await browser.run(LAST_TICK)).replace(",", "")) < STEPS / 2
        assert await browser.run("document.querySelector('.tip').hidden") is False
        await browser.run("document.querySelector('.chart').focus()")
        await browser.key("0")
        assert await browser.run(LAST_TICK) in ("1,800", "1,900", "2,000")
        await browser.key("Home")
        assert "step 0: " in await browser.run("document.querySelector('.chart [aria-live]').textContent")

        await browser.run(CHANGE.format("e.rank.value = 'all'"))
        assert await browser.run(lines) == 4
        await browser.run(CHANGE.format("e.weight.value = 0.9; e.log.checked = true; e.x.value = 'time'"))
        assert await browser.run("document.querySelectorAll('.panel path.raw').length") == 4
        await browser.run(CHANGE.format("document.querySelector('[name=run]').checked = false; e.weight.value = 0"))
        assert await browser.run(lines) == 2

        first_run = "document.querySelector('#runs tbody th').textContent"
        assert await browser.run(first_run) == IDS[0]
        await browser.run("document.querySelectorAll('#runs .sort')[3].click()")
        assert await browser.run("document.querySelectorAll('#runs th')[3].getAttribute('aria-sort')") == "ascending"
        assert await browser.run(first_run) == IDS[1]  # it took 1 s, the other one 3 s

        await browser.open((tmp_path / "report.html").as_uri(), 390, dark=True)
        assert await browser.run("document.documentElement.scrollWidth") == 390
        assert await browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        await browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        metrics = (
            "[...document.querySelectorAll('[aria-label=Metrics]')].every((one) => one.scrollWidth <= one.clientWidth)"
        )
        assert await browser.run(metrics)

    in_browser(tmp_path, visit)


def test_hostile_run_changes_nothing(tmp_path: Path, run_cli: Cli) -> None:
    write_hostile_run(tmp_path / "runs/evil")
    report(run_cli, "evil", "-o", "report.html")
    assert (tmp_path / "report.html").stat().st_size < 3_000_000

    async def visit(browser: Browser) -> str:
        await browser.open((tmp_path / "report.html").as_uri(), 390)
        await browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert await browser.run("document.documentElement.scrollWidth") == 390
        assert await browser.run("document.querySelectorAll('.panel path.line').length") >= 1
        assert MARK in await browser.run("document.body.innerText")  # the text itself
        return str(await browser.run("document.title"))

    assert in_browser(tmp_path, visit) == "Run evil"


@pytest.mark.long
def test_selection_on_an_axis_of_a_sweep(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "runs" / "sweep-1"
    folder.mkdir(parents=True)
    trials = [
        {
            "number": at,
            "state": "complete",
            "value": at / 10,
            "params": {"params.lr": 10.0**-at, ATTACKS[1]: ATTACKS[0]},
        }
        for at in range(1, 5)
    ]
    space = {
        "params.lr": {"kind": "log", "low": 1e-4, "high": 0.1},
        ATTACKS[1]: {"kind": "choice", "values": [ATTACKS[0]]},
    }
    about = {"format": 1, "name": "s", "source": "", "started_at": ""}
    sweep = {
        **about,
        "sweep_id": "sweep-1",
        "status": "succeeded",
        "metric": "loss",
        "mode": "min",
        "best": 1,
        "space": space,
    }
    (folder / "run.json").write_text('{"run_id": "sweep-1", "kind": "sweep", "status": "succeeded"}')
    (folder / "sweep.json").write_text(json.dumps({**sweep, "trials": trials}))
    report(run_cli, "sweep-1", "-o", "report.html")

    async def visit(browser: Browser) -> None:
        await browser.open((tmp_path / "report.html").as_uri(), 1000)
        assert await browser.run("document.title") == "Sweep sweep-1"
        assert await browser.run("document.querySelectorAll('path.trial').length") == 4
        assert await browser.run("document.querySelector('path.best title').textContent") == "trial 1, complete: 0.1"
        x, y, height = await browser.run(FIRST_AXIS)
        await browser.drag(x, y + 1, x, y + height / 2)  # the upper half: the learning rates 0.1 and 0.01
        assert await browser.run(SHOWN_TRIALS) == ["1", "2"]
        await browser.drag(x, y + 1, x, y + 1)
        assert await browser.run(SHOWN_TRIALS) == ["1", "2", "3", "4"]

    in_browser(tmp_path, visit)
