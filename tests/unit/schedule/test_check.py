"""Which models are late."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.schedule.check import judge
from ddptrain.schedule.entries import Entry

NOW = datetime(2026, 11, 22, 12, 30, tzinfo=UTC)
ENTRY = Entry("pets", "pets", "/c.yaml", "/", "0 * * * * UTC", "cron", (), added_at="2026-11-20T00:00:00.000Z")


def ended(time: str, status: str = "promoted", reason: str = "") -> RetrainRecord:
    return RetrainRecord(
        3, "pets", f"2026-11-22T{time}:00.000Z", status=status, ended_at=f"2026-11-22T{time}:30.000Z", reason=reason
    )


@pytest.mark.parametrize(
    ("newest", "now", "state", "reason"),
    [
        ([ended("12:01")], NOW, "ok", "last success 2026-11-22 12:01 UTC"),
        ([ended("12:01", "unchanged")], NOW, "ok", "12:01"),
        ([ended("12:20", "failed"), ended("12:01")], NOW, "ok", "12:01"),
        ([ended("11:50")], NOW, "late", "none was started since then"),
        ([ended("11:50")], NOW.replace(minute=9), "ok", "11:50"),  # a start may take ten minutes
        ([ended("12:01", "rejected", "worse")], NOW, "late", "retraining 3 ended as rejected: worse"),
        ([ended("12:01", "running")], NOW, "late", "retraining 3 has no recorded end"),
        ([], NOW, "late", "none was ever started"),
        ([], datetime(2026, 11, 20, 0, 5, tzinfo=UTC), "waiting", "first at 2026-11-20 01:00 UTC"),
    ],
)
def test_last_success_must_not_be_older_than_the_schedule_allows(
    newest: list[RetrainRecord], now: datetime, state: str, reason: str
) -> None:
    found = judge(ENTRY, newest, now)
    assert found.state == state and reason in found.reason
