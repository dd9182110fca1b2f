"""The wire contract: what is encoded comes back, and nothing that a rank writes gets further than an error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.protocol import events

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
    events.Tracked(1, "wandb", {"url": "https://wandb.ai/a/b/runs/c"}),
    events.TrackerFailed(1, "wandb", "could not start: ConnectionError", strict=True),
    events.Finishing(1, timeout_s=30.5),
    events.Timed(1, "evaluation", 1.5),
    events.StepTimes(1, 0.3, 0.1, 0.2),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_event_survives_the_wire(event: events.Event) -> None:
    assert events.decode(events.encode(event)) == event


def test_every_kind_has_an_example() -> None:
    assert {event.kind for event in EXAMPLES} == set(events.KINDS)


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
        b'{"event":"metrics","time_ns":1,"step":1,"values":{"a":-1%s}}' % (b"0" * 20),
    ],
)
def test_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(events.EventFormatError):
        events.decode(line)


def test_largest_integers_and_long_floats_are_kept() -> None:
    line = b'{"event":"metrics","time_ns":1,"step":%d,"values":{"a":0.12345678901234567890,"b":-%d}}' % (
        2**64 - 1,
        2**63,
    )
    assert events.decode(line) == events.Metrics(1, {"a": 0.12345678901234568, "b": -(2**63)}, 2**64 - 1)


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
