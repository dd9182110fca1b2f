"""ddptrain's own log: one line a record, with fields, and without secrets and control characters."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ddptrain import log
from ddptrain.errors import UsageError


class Lines(logging.Handler):
    """Keeps the lines of the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    log.attach(handler, logging.DEBUG)
    yield handler.lines
    log.detach(handler)
    log.set_context(run=None, attempt=None, secrets=())


def without_time(line: str) -> str:
    time, _, rest = line.partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time), line
    return rest


def test_run_attempt_and_rank_stand_before_the_message_and_other_fields_behind(lines: list[str]) -> None:
    log.set_context(run="toy-1", attempt=2)
    log.Log("ddptrain.driver.attempt.loop").info("rank ordered", worker="tcp://a:1", rank=3, left_s=0.5, gpu=None)
    assert without_time(lines[0]) == ("INFO driver run=toy-1 attempt=2 rank=3 rank ordered worker=tcp://a:1 left_s=0.5")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ddptrain.driver.fault", "driver"),
        ("ddptrain.clusters.lifecycle", "clusters"),
        ("ddptrain.rank-server", "rank-server"),
        ("ddptrain", "ddptrain"),
    ],
)
def test_line_names_the_part_that_speaks(lines: list[str], name: str, part: str) -> None:
    log.Log(name).warning("x")
    assert without_time(lines[0]) == f"WARNING {part} x"


def test_values_with_blanks_are_quoted_and_lists_have_commas(lines: list[str]) -> None:
    log.Log("ddptrain.driver").info("x", text='say "hi"', ranks=[0, 1], sizes={"a": 1}, empty="")
    assert without_time(lines[0]) == (r'INFO driver x text="say \"hi\"" ranks="0, 1" sizes="{\"a\": 1}" empty=""')


def test_secrets_do_not_reach_the_log(lines: list[str]) -> None:
    log.set_context(secrets=["hunter22"])
    log.Log("ddptrain.driver").info(
        "password=swordfish",
        url="s3://key:topsecret@host/x",
        api_key="abcdef",
        env={"PGPASSWORD": "pgpg"},
        a="hunter22!",
    )
    assert without_time(lines[0]) == (
        'INFO driver password=<left out> url="s3://<left out>@host/x" api_key="<left out>" '
        r'env="{\"PGPASSWORD\": \"<left out>\"}" a="<left out>!"'
    )


def test_text_of_others_adds_no_lines_and_no_control_characters(lines: list[str]) -> None:
    log.Log("ddptrain.driver").info("a\nb", host="evil\x1b[2J\n2026-01-01T00:00:00.000Z INFO driver forged")
    assert "\n" not in lines[0] and "\x1b" not in lines[0]
    assert r"a\nb host=" in lines[0]


def test_long_values_are_cut(lines: list[str]) -> None:
    log.Log("ddptrain.driver").info("x", text="y" * 3000)
    assert without_time(lines[0]) == 'INFO driver x text="' + "y" * 2000 + '... (3000 characters)"'


def test_level_is_that_of_the_most_talkative_handler_and_nothing_is_left_behind() -> None:
    logger = logging.getLogger("ddptrain")
    before = logger.level
    quiet, loud = Lines(), Lines()
    log.attach(quiet, logging.INFO)
    log.attach(loud, logging.DEBUG)
    log.Log("ddptrain.driver").debug("detail")
    assert (len(quiet.lines), len(loud.lines)) == (0, 1)
    log.detach(loud)
    assert not logging.getLogger("ddptrain.driver").isEnabledFor(logging.DEBUG)
    log.detach(quiet)
    assert logger.level == before


def test_importing_program_sees_nothing_and_may_configure_logging_itself() -> None:
    code = (
        "import logging, ddptrain.log as log; log.Log('ddptrain.driver').warning('one');"
        "logging.basicConfig(format='%(levelname)s %(name)s %(message)s %(fields)s');"
        "log.Log('ddptrain.driver').warning('two', rank=3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "WARNING ddptrain.driver two {'rank': 3}\n")


@pytest.mark.parametrize(("value", "shown"), [("debug", ["d", "i"]), ("INFO", ["i"]), ("warning", []), ("", [])])
def test_variable_decides_what_stderr_gets(
    value: str, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPTRAIN_LOG", value)
    log.divert(None)  # which a display of another test may not have done
    try:
        log.to_stderr()
        log.Log("ddptrain.driver").debug("d")
        log.Log("ddptrain.driver").info("i")
    finally:
        log.detach(log._stderr)
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == shown


def test_unknown_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPTRAIN_LOG", "loud")
    with pytest.raises(UsageError, match="DDPTRAIN_LOG is 'loud'; choose one of debug, info, warning"):
        log.to_stderr()


def test_record_of_another_process_is_one_harmless_line(lines: list[str]) -> None:
    text = log.as_text("rank started", start="cold: 2 threads", reason=None, why="a\nb\x1b[2J password=abc")
    log.Log("ddptrain.worker").info(text, rank=3)
    assert without_time(lines[0]) == (
        r'INFO worker rank=3 rank started start="cold: 2 threads" why="a\\nb password=<left out>"'
    )


def test_a_thread_can_have_a_context_of_its_own(lines: list[str]) -> None:
    def run() -> None:
        with log.own_context():
            log.set_context(run="trial", attempt=2)
            log.Log("ddptrain.driver").info("mine")
        log.Log("ddptrain.driver").info("no longer mine")

    log.set_context(run="sweep")
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        log.Log("ddptrain.driver").info("of all")
    finally:
        log.set_context(run=None)
    assert [line.split("driver ")[1] for line in lines] == [
        "run=trial attempt=2 mine",
        "run=sweep no longer mine",
        "run=sweep of all",
    ]
