"""Which events users are notified of, and what each message says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.notify.sender import Message
from ddptrain.retrain.messages import compose, events_to_report, known_states

DEFAULT = ("failed", "rejected", "recovered", "hang")
EVERYTHING = (*DEFAULT, "promoted", "always")


@pytest.mark.parametrize(
    ("on", "status", "earlier", "reported"),
    [
        # the first time, and while it lasts
        (DEFAULT, "failed", [], ("failed",)),
        (DEFAULT, "failed", ["failed"], ()),
        (DEFAULT, "rejected", [], ("rejected",)),
        (DEFAULT, "rejected", ["rejected"], ()),
        # another state
        (DEFAULT, "failed", ["rejected"], ("failed",)),
        (DEFAULT, "rejected", ["failed"], ("rejected",)),
        (DEFAULT, "failed", ["rejected", "failed", "rejected"], ("failed",)),
        # a success ends a state
        (DEFAULT, "failed", ["failed", "promoted"], ("failed",)),
        (DEFAULT, "failed", ["failed", "unchanged"], ("failed",)),
        (DEFAULT, "promoted", ["failed"], ("recovered",)),
        (DEFAULT, "unchanged", ["rejected"], ("recovered",)),
        (DEFAULT, "promoted", ["failed", "promoted"], ()),
        (DEFAULT, "promoted", [], ()),
        (DEFAULT, "unchanged", ["promoted"], ()),
        # what is neither good nor bad changes nothing
        (DEFAULT, "failed", ["failed", "interrupted", "skipped", "deadline", "abandoned"], ()),
        (DEFAULT, "promoted", ["failed", "interrupted"], ("recovered",)),
        (DEFAULT, "interrupted", ["failed"], ()),
        (DEFAULT, "deadline", [], ()),
        (DEFAULT, "skipped", ["failed"], ()),
        # only what was asked for
        ((), "failed", [], ()),
        (("rejected",), "failed", [], ()),
        (("failed",), "promoted", ["failed"], ()),
        (("promoted",), "promoted", ["failed"], ("promoted",)),
        (EVERYTHING, "promoted", ["failed"], ("recovered", "promoted")),
        (EVERYTHING, "promoted", [], ("promoted",)),
        (EVERYTHING, "failed", ["failed"], ("always",)),
        (EVERYTHING, "failed", [], ("failed",)),
        (("always",), "failed", [], ("always",)),
        (("always",), "unchanged", [], ("always",)),
        (("finished",), "unchanged", [], ("finished",)),
        (("finished", "recovered"), "promoted", ["failed"], ("recovered",)),
        (("finished",), "failed", [], ()),
        (("always",), "interrupted", [], ("always",)),
        (("always",), "deadline", [], ("always",)),
        (EVERYTHING, "skipped", [], ()),
        (EVERYTHING, "running", [], ()),
        (EVERYTHING, "abandoned", [], ()),
    ],
)
def test_only_changes_of_state_are_reported(
    on: tuple[str, ...], status: str, earlier: list[str], reported: tuple[str, ...]
) -> None:
    assert events_to_report(on, status, earlier) == reported


def ended(number: int, status: str, hour: int, *told: str) -> RetrainRecord:
    time = f"2026-11-22T{hour:02}:00:00.000Z"
    return RetrainRecord(number, "petnames", time, status=status, ended_at=time, told=told)


@pytest.mark.parametrize(
    ("newest", "status", "events"),
    [
        ([], "unchanged", ()),
        ([ended(2, "failed", 4, "failed"), ended(1, "promoted", 3)], "unchanged", ("recovered",)),
        ([ended(2, "failed", 4, "failed")], "failed", ()),  # once for a week without a cluster
        ([ended(2, "failed", 4)], "failed", ("failed",)),  # nobody got the message
        ([ended(2, "deadline", 5, "failed")], "promoted", ("recovered",)),  # failed, continued, continued again
        ([ended(2, "deadline", 5)], "promoted", ()),
        ([ended(2, "running", 5)], "failed", ("failed",)),
    ],
)
def test_states_that_users_know(newest: list[RetrainRecord], status: str, events: tuple[str, ...]) -> None:
    assert events_to_report(DEFAULT, status, known_states(DEFAULT, newest)) == events


def message(event: str, status: str = "", **record: Any) -> Message:
    resolved = load_mapping({"workload": "petnames"}, Path("/srv/pets"))
    return compose(event, RetrainRecord(1, "names", "", status=status or event, **record), resolved, 130.2)


def test_message_of_a_rejection_is_complete() -> None:
    scores = {"candidate": {"val/loss": 2.61, "acc": math.nan}, "champion": {"val/loss": 2.55, "top5": 0.5}}
    found = message(
        "rejected",
        reason="val/loss is 2.61, above at_most 2.6",
        scores=scores,
        gate=(GateOutcome("val/loss", False, "val/loss: 2.61 is above at_most 2.6"),),
        difference=("+312 names",),
        version=4,
        champion=3,
        run_id="names-1",
        exit_code=7,
        host="vm",
    )
    assert (found.title, found.kind) == ("names: version 4 did not pass the gate", "warning")
    lines = found.body.splitlines()
    metrics = ["- `acc`: nan, champion -", "- `top5`: -, champion 0.5", "- `val/loss`: 2.61, champion 2.55 (+0.06)"]
    facts = ["- exit code: `7`", "- run: `names-1`", "- duration: `2m 10s`", "- host: `vm`", "- `+312 names`"]
    assert [line for line in lines if "champion " in line and line[0] == "-"] == metrics and {*facts} <= {*lines}


@pytest.mark.parametrize(
    ("event", "record", "title", "first"),
    [
        ("failed", {"reason": "no names", "champion": 3}, "failed: no names", "Version 3 is still"),
        ("rejected", {}, "the new version did not pass", "did not pass the gate."),
        ("promoted", {"version": 4, "champion": 3}, "version 4 is", "before was version 3"),
        ("promoted", {"version": 1}, "version 1 is the champion", "version 1 is the champion."),
        ("recovered", {"status": "promoted", "version": 4}, "works again, version 4", "works again: "),
        ("recovered", {"status": "unchanged"}, "the model is up to date", "works again: "),
        ("always", {"status": "deadline", "run_id": "r-1"}, "ended: deadline", "ended: deadline"),
    ],
)
def test_each_event_says_what_happened(event: str, record: dict[str, Any], title: str, first: str) -> None:
    found = message(event, **record)
    assert title in found.title and first in found.body.splitlines()[0]


def test_texts_of_other_people_stay_on_their_line() -> None:
    reason = "Error: \x1b[31mred\x1b[0m\n**bold** `code` " + "x" * 1000
    found = message("failed", reason=reason, gate=(GateOutcome("m", False, "a\nb"),))
    assert "\x1b" not in found.title + found.body
    (line,) = [line for line in found.body.splitlines() if line.startswith("- root cause: `")]
    assert len(line) < 550 and "**bold** 'code' x" in line


def test_many_metrics_are_cut() -> None:
    found = message("rejected", scores={"candidate": {f"metric{number:03d}": 1.0 for number in range(100)}})
    assert "metric019" in found.body and "metric020" not in found.body
