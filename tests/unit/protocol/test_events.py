"""Events of ranks and news of workers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.protocol import events, news
from ddptrain.protocol.news import HOST_METRICS, RANK_METRICS, News, NewsError, RankExit, RankNews, SystemSample

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
    events.TrackerFailed(1, "wandb", "could not start: ConnectionError"),
    events.Finishing(1, timeout_s=30.5),
    events.Timed(1, "evaluation", 1.5),
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


# --- News: valid ones survive their way; everything else is refused with one kind of error ---


COUNTS = st.integers(0, 1 << 50)
AMOUNTS = st.none() | st.floats(0.0, allow_infinity=False, allow_nan=False)
EXITS = st.builds(RankExit, COUNTS, st.integers(-64, 255), COUNTS, st.text(), st.booleans(), st.booleans())
RANK_NEWS = st.builds(
    RankNews,
    *(COUNTS, COUNTS, COUNTS, st.binary(max_size=1000), st.binary(max_size=1000), AMOUNTS, AMOUNTS),
    ended=st.none() | EXITS,
    broken=st.text(max_size=9),
)
SAMPLES = st.builds(
    SystemSample,
    *(COUNTS, COUNTS, st.text(max_size=9)),
    use=st.dictionaries(st.sampled_from(sorted(HOST_METRICS)), st.floats(0, 1e9)),
    ranks=st.dictionaries(st.sampled_from("012"), st.dictionaries(st.sampled_from(sorted(RANK_METRICS)), st.floats(0))),
)
VALID = st.builds(
    News,
    *(st.integers(1, 1 << 50), st.lists(RANK_NEWS, max_size=3).map(tuple), st.integers(0, 65_535), st.booleans()),
    sample=st.none() | SAMPLES.filter(lambda sample: "inf" not in repr(sample)),
    worker=st.just("tcp://w"),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
EXIT = RankExit(4711, -9, 1_700_000_000_000_000_000, "out of memory", timed_out=True)


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the driver gets it."""
    travelled: dict[str, Any] = msgpack.unpackb(msgpack.packb(message), use_list=False)
    return {**travelled, "worker": "tcp://w"}


@given(VALID)
def test_valid_news_survive_messagepack(message: News) -> None:
    assert news.decode(sent(news.encode(message))) == message


@given(ANYTHING)
def test_anything_else_is_refused_and_nothing_but_newserror_is_raised(message: Any) -> None:
    for wrong in (message, {"news": message, "worker": "tcp://w"}):
        if wrong == {"news": {}, "worker": "tcp://w"} or isinstance(message, dict):
            continue
        with pytest.raises(NewsError):
            news.decode(wrong)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "attempt: Field required"),
        ({"attempt": 0}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"attempt": 1, "store_port": 65_536}, "store_port"),
        ({"attempt": 1, "ranks": ({},)}, r"ranks\.0\.rank"),
        ({"attempt": 1, "ranks": ({"rank": -1},)}, r"ranks\.0\.rank"),
        ({"attempt": 1, "ranks": ({"rank": 0, "log_size": 1 << 51},)}, "log_size"),
        ({"attempt": 1, "ranks": ({"rank": 0, "log_size": 1.5},)}, "log_size"),
        ({"attempt": 1, "ranks": ({"rank": 0, "log": "text"},)}, r"ranks\.0\.log"),
        ({"attempt": 1, "ranks": ({"rank": 0, "log": bytes(1 << 15)},)}, r"ranks\.0\.log"),
        ({"attempt": 1, "ranks": ({"rank": 0, "cpu_s": math.nan},)}, "cpu_s"),
        ({"attempt": 1, "ranks": ({"rank": 0, "gpu_percent": -1.0},)}, "gpu_percent"),
        ({"attempt": 1, "ranks": ({"rank": 0, "ended": {"pid": 1, "status": 256, "time_ns": 1}},)}, "status"),
        ({"attempt": 1, "sample": {"rank": 0, "time_ns": 1, "host": "h", "use": {"x": 1.0}, "ranks": {}}}, "use"),
        ({"attempt": 1, "sample": {"rank": 0, "time_ns": 1, "host": "h", "use": {}, "ranks": {"\x1b": {}}}}, "ranks"),
    ],
)
def test_reason_names_the_field(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NewsError, match=reason):
        news.decode({"news": fields, "worker": "tcp://w"})


def test_unknown_fields_of_a_newer_worker_are_passed_over() -> None:
    assert news.decode({"news": {"attempt": 1, "mood": "good"}, "worker": "w"}) == News(1, worker="w")


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
