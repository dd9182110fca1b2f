"""Events of ranks and notices of workers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.protocol import events, worker_notices
from ddptrain.protocol.worker_notices import (
    Alive,
    Growth,
    Leaving,
    Notice,
    NoticeError,
    OutputBytes,
    RankExit,
    StoreOpened,
)

# --- The wire contract: what is encoded comes back, and nothing that a rank writes gets further than an error ---


EXAMPLES: list[events.Event] = [
    events.Started(1, pid=2, host="h", device="cpu", environment={"A": {"value": "1", "source": "user"}}),
    events.Entered(1),
    events.Metrics(1, {"train/loss": 0.5}, step=3, epoch=1.5),
    events.Progress(1, done=3, total=None),
    events.Epochs(1, total=20),
    events.CheckpointSaved(1, 5, "checkpoint-0", (events.StagedFile("model.safetensors", 3, "ab"),), 1, {"l": 1}),
    events.CheckpointSaved(
        1, 5, "c", (), parts=(events.CheckpointPart(1, "c", (events.StagedFile("model.rank-1.safetensors", 3, "ab"),)),)
    ),
    events.FileSaved(1, "a/b.txt", "file-1", 3, "ab"),
    events.Failure(1, "ValueError", "boom", "Traceback", exit_code=None, lost_peer=True),
    events.ThreadFailure(1, "reader", "ValueError", "boom", "Traceback"),
    events.Stacks(1, ("train.py:3 main", "run.py:1 <module>"), sequence=7, state="stopped"),
    events.Noticed(1),
    events.Preempted(1, step=5),
    events.Returned(1, '{"loss": 0.5}'),
    events.Finished(1),
    events.Note(1, "said", "warning"),
    events.Alert(1, "the loss has doubled"),
    events.Tracked(1, "wandb", {"url": "https://wandb.ai/a/b/runs/c"}),
    events.TrackerFailed(1, "wandb", "could not start: ConnectionError", strict=True),
    events.Finishing(1, timeout_s=30.5),
    events.Timed(1, "evaluation", 1.5),
    events.StepTimes(1, 0.3, 0.1, 0.2),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_event_survives_the_wire(event: events.Event) -> None:
    assert events.decode(events.encode(event)) == event


def test_not_a_number_survives_the_wire() -> None:
    back = events.decode(events.encode(events.Metrics(1, {"loss": math.nan})))
    assert isinstance(back, events.Metrics)
    assert math.isnan(back.values["loss"])


def test_unknown_fields_of_a_newer_rank_are_passed_over() -> None:
    assert events.decode(b'{"event":"finished","time_ns":1,"mood":"good"}') == events.Finished(1)


def test_lone_surrogates_in_a_message_can_be_sent() -> None:
    assert isinstance(events.decode(events.encode(events.Note(1, "\ud800"))), events.Note)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'{"time_ns":1,"event":"finished"}',
        b"[1]",
        b"{}",
        b'{"event":"mystery","time_ns":1}',
        b'{"event":"finished"}',
        b'{"event":"finished","time_ns":"1"}',
        b'{"event":"finished","time_ns":true}',
        b'{"event":"metrics","time_ns":1,"values":{"a":"b"}}',
        b'{"event":"metrics","time_ns":1,"values":[1]}',
        b'{"event":"checkpoint","time_ns":1,"step":1,"staging":"s","files":[{"name":1,"size_bytes":1,"sha256":""}]}',
        b'{"event":"file","time_ns":1,"path":null,"staging":"s","size_bytes":1,"sha256":""}',
        b'{"event":"stacks","time_ns":1,"main":"train.py:3 main"}',
        b"[" * 100_000,
        b'{"event":"note","time_ns":1%s,"text":"a"}' % (b"0" * 400),  # such an integer can't become a float
        b'{"event":"metrics","time_ns":1,"step":1%s,"values":{"a":1}}' % (b"0" * 400),
    ],
)
def test_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(events.EventFormatError):
        events.decode(line)


def test_event_over_the_limit_is_refused_where_it_is_made() -> None:
    with pytest.raises(events.EventFormatError, match="send a file instead"):
        events.encode(events.Note(1, "x" * events.MAX_LINE_BYTES))


@settings(max_examples=500)
@given(st.binary(max_size=200) | st.text().map(lambda text: f'{{"event":"note","time_ns":{text}}}'.encode()))
def test_arbitrary_bytes_never_raise_anything_else(line: bytes) -> None:
    try:
        events.decode(line)
    except events.EventFormatError:
        pass


def test_only_metrics_and_progress_can_wait() -> None:
    numbers = events.encode(events.Metrics(1, {"a": 1.0}, 1)) + events.encode(events.Progress(1, 2))
    assert events.are_numbers(numbers) and events.are_numbers(b"") and events.are_numbers(numbers + numbers[:20])
    assert not events.are_numbers(numbers + events.encode(events.Entered(1)))
    assert not events.are_numbers(numbers + b'{"ev')  # the rest may be anything


# --- Every valid notice survives its way; everything else is refused with one kind of error ---


COUNTS = st.integers(0, 1 << 50)
AMOUNTS = st.none() | st.floats(0.0, allow_infinity=False, allow_nan=False)
HEAD = (st.integers(1, 1 << 50), COUNTS)
VALID = st.one_of(
    st.builds(Alive, *HEAD, AMOUNTS, AMOUNTS),
    st.builds(Leaving, *HEAD),
    st.builds(StoreOpened, *HEAD, st.integers(1, 65_535)),
    st.builds(Growth, *HEAD, COUNTS, COUNTS),
    st.builds(OutputBytes, *HEAD, st.sampled_from(["log", "events"]), COUNTS, st.binary(max_size=1000)),
    st.builds(RankExit, *HEAD, COUNTS, st.integers(-64, 255), COUNTS, COUNTS, COUNTS, st.text(), st.booleans()),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({name for cls in worker_notices.KINDS.values() for name in cls.__dataclass_fields__}))
EXIT = RankExit(2, 1, 4711, -9, 1_700_000_000_000_000_000, 10, 20, "out of memory", timed_out=True)


@given(VALID)
def test_valid_notice_survives_messagepack(notice: Notice) -> None:
    travelled = msgpack.unpackb(msgpack.packb(worker_notices.encode(notice)))
    assert worker_notices.decode({**travelled, "worker": "tcp://added-by-the-scheduler"}) == notice


def test_exit_survives_as_the_result_of_a_task() -> None:
    assert worker_notices.exit_from_json(worker_notices.exit_to_json(EXIT)) == EXIT
    assert json.loads(worker_notices.exit_to_json(EXIT))["notice"] == "exit"


@given(ANYTHING)
def test_anything_else_is_refused_and_nothing_but_noticeerror_is_raised(message: Any) -> None:
    with pytest.raises(NoticeError):
        worker_notices.decode(message)


@given(VALID, NAMES, ANYTHING)
def test_any_value_in_any_field_is_refused_or_gives_a_valid_notice(notice: Notice, name: str, value: Any) -> None:
    try:
        decoded = worker_notices.decode({**worker_notices.encode(notice), name: value})
    except NoticeError:
        return
    assert worker_notices.decode(worker_notices.encode(decoded)) == decoded
    for field in dataclasses.fields(decoded):
        number = getattr(decoded, field.name)
        if isinstance(number, int | float):
            assert math.isfinite(number) and (number >= 0 or field.name == "status")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, "unknown kind"),
        ({"notice": "dance", "attempt": 1, "rank": 0}, "unknown kind a value of type str 'dance'"),
        ({"notice": ["alive"], "attempt": 1, "rank": 0}, "unknown kind"),
        ({"notice": "leaving", "rank": 0}, "leaving: attempt is missing"),
        ({"notice": "leaving", "attempt": 0, "rank": 0}, "attempt is a value of type int 0"),
        ({"notice": "leaving", "attempt": "1", "rank": 0}, "attempt is a value of type str '1'"),
        ({"notice": "leaving", "attempt": 1, "rank": -1}, "rank is a value of type int -1"),
        ({"notice": "leaving", "attempt": 1, "rank": True}, "rank is a value of type bool"),
        ({"notice": "leaving", "attempt": 1, "rank": 1 << 60}, "rank"),
        ({"notice": "alive", "attempt": 1, "rank": 0, "cpu_s": math.nan}, "cpu_s is a value of type float nan"),
        ({"notice": "alive", "attempt": 1, "rank": 0, "cpu_s": -1.0}, "cpu_s"),
        ({"notice": "alive", "attempt": 1, "rank": 0, "gpu_percent": math.inf}, "gpu_percent"),
        ({"notice": "store_opened", "attempt": 1, "rank": 0, "port": 0}, "port"),
        ({"notice": "store_opened", "attempt": 1, "rank": 0, "port": 65_536}, "port"),
        ({"notice": "growth", "attempt": 1, "rank": 0, "log_size": 1 << 51, "events_size": 0}, "log_size"),
        ({"notice": "growth", "attempt": 1, "rank": 0, "log_size": 1.5, "events_size": 0}, "log_size"),
        ({"notice": "output", "attempt": 1, "rank": 0, "stream": "log", "offset": -1, "data": b""}, "offset"),
        ({"notice": "output", "attempt": 1, "rank": 0, "stream": "err", "offset": 0, "data": b""}, "stream"),
        ({"notice": "output", "attempt": 1, "rank": 0, "stream": "log", "offset": 0, "data": "text"}, "data"),
        ({"notice": "output", "attempt": 1, "rank": 0, "stream": "log", "offset": 0, "data": bytes(1 << 15)}, "data"),
        ({**worker_notices.encode(EXIT), "status": 256}, "status"),
        ({**worker_notices.encode(EXIT), "status": "-9"}, "exit: status is a value of type str '-9'"),
        ({**worker_notices.encode(EXIT), "timed_out": 1}, "timed_out"),
        ({**worker_notices.encode(EXIT), "reason": "x" * 5000}, "reason"),
    ],
)
def test_reason_names_the_field_and_its_value(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoticeError, match=reason):
        worker_notices.decode(message)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1", '{"notice": "leaving", "attempt": 1, "rank": 0}'])
def test_text_that_is_no_exit_is_refused(text: str) -> None:
    with pytest.raises(NoticeError):
        worker_notices.exit_from_json(text)


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (0, "", "exit code 0"),
        (3, "", "exit code 3"),
        (-11, "", "killed by SIGSEGV"),
        (-9, "likely out of memory", "killed by SIGKILL: likely out of memory"),
        (-99, "", "killed by signal 99"),
    ],
)
def test_exit_is_described_by_its_status(status: int, reason: str, text: str) -> None:
    assert dataclasses.replace(EXIT, status=status, reason=reason).text == text
