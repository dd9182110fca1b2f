"""Tells coverage.py which test runs, in this process and in those that the test starts; notes how long each takes.

Code that a fixture of a module or a session executes counts for the whole test file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

CONTEXT = "DDPTRAIN_MUTANTS_CONTEXT"  # the context of subprocesses; the configuration of coverage names it
OUTCOMES = "DDPTRAIN_MUTANTS_OUTCOMES"  # file that gets {test: [passed, seconds]}

_outcomes: dict[str, tuple[bool, float]] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Setup, call and teardown of a test are its context."""
    _switch(item.nodeid)
    try:
        return (yield)
    finally:
        _switch("")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fixture that several tests share is executed for all tests of the file."""
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ.get(CONTEXT, "")
    _switch(before.partition("::")[0])
    try:
        return (yield)
    finally:
        _switch(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    passed, seconds = _outcomes.get(report.nodeid, (True, 0.0))
    _outcomes[report.nodeid] = (passed and report.passed, seconds + report.duration)


def pytest_sessionfinish() -> None:
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes), encoding="utf-8")


def _switch(context: str) -> None:
    os.environ[CONTEXT] = context
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(context)
