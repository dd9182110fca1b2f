"""When a cluster counts as ready or shrunk, what is told meanwhile, and how a wait that fails is explained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters import wait_ready
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.provider import Provider
from ddptrain.clusters.wait_ready import ReadinessWait, last_words
from ddptrain.errors import ClusterError
from ddptrain.worker import driver_calls

WARM = {"fault": "", "ours": True, "warm": True}
COLD = {**WARM, "warm": False}
FOREIGN = {"fault": "", "ours": False, "warm": False}


def worker(name: str, slots: int = 2, held: int = 0, host: str = "h") -> dict[str, Any]:
    more = {"gpus": 0, "warm": None}
    return {"name": name, "address": f"tcp://{name}", "host": host, "slots": slots, "held": held, **more}


class Bench:
    """A wait for a cluster whose scheduler gives one answer after the other; the last one stays."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int = 0, timeout_s: float = 60.0
    ) -> None:
        self.now = 100.0
        self.answers: list[Sequence[dict[str, Any]]] = [[]]
        self.warmth: list[dict[str, Any]] = [{}]
        self.asked_faults: list[float] = []
        self.told: list[str] = []
        self.texts: dict[str, str] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(wait_ready, "time", clock)
        self.cluster = Deployment(folder, ClusterRecord("dev", "x", "now", address="tcp://s", workers=workers))
        self.wait = ReadinessWait(self.cluster, cast(Provider, self), self.told.append, timeout_s, self.now)
        self.wait._client = cast(Any, self)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def run_on_scheduler(self, function: Any) -> dict[str, Any]:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return {"workers": found, "runs": [], "waiting": []}

    def run(self, function: Any, seconds: float, on_error: str) -> dict[str, Any]:
        assert (function, seconds, on_error) == (driver_calls.wait_until_warm, 1.0, "return")
        return self.warmth.pop(0) if len(self.warmth) > 1 else self.warmth[0]

    def logs(self, cluster: Deployment, lines: int) -> dict[str, str]:
        assert lines == 12
        return self.texts

    def warm(self, *names: str, answer: Any = WARM) -> None:
        self.warmth.append({f"tcp://{name}": answer for name in names})


class WithFaults(Bench):
    """A provider that knows why a part has ended."""

    why: str | None = None

    def fault(self, cluster: Deployment) -> str | None:
        self.asked_faults.append(self.now)
        return self.why


def test_cluster_is_ready_once_all_workers_are_there_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch, workers=2)
    bench.answers = [[], [worker("a")], [worker("a")], [worker("a"), worker("b")]]
    bench.warmth = [{"tcp://a": WARM, "tcp://b": COLD}]
    bench.warm("a")  # b has just left
    bench.warm("a", "b", answer=OSError("hung up"))
    bench.warmth.append({"tcp://a": WARM, "tcp://b": FOREIGN})
    view = bench.wait.until_ready(4)
    assert bench.told == [
        "1 of 2 workers joined, 2 slots",
        "2 of 2 workers joined, 4 slots",
        "warm",
    ]
    assert [each.warm for each in view.workers] == [True, None] and view.slots == 4
    assert bench.now == pytest.approx(100.0 + 6 * 0.02)


@pytest.mark.parametrize(("asked", "workers"), [(None, 0), (None, 1), (2, 1)])
def test_one_worker_is_enough_where_no_more_are_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, workers: int
) -> None:
    bench = Bench(tmp_path, monkeypatch, workers=workers)
    bench.answers = [[worker("a")]]
    bench.warmth = [{"tcp://a": WARM}]
    assert bench.wait.until_ready(asked).slots == 2


@pytest.mark.parametrize(
    ("workers", "there", "asked", "told"),
    [
        (1, [worker("a", 2)], 3, "3 slots needed, but only 2 joined (2 from a (h)), and no more workers are starting"),
        (
            1,
            [worker("h", 0)],
            None,
            "1 worker ordered, 1 joined with 0 slots (0 from h), and no more workers are starting",
        ),
    ],
)
def test_too_few_slots_are_told_at_once_when_all_workers_are_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    there: list[dict[str, Any]],
    asked: int | None,
    told: str,
) -> None:
    bench = Bench(tmp_path, monkeypatch, workers=workers)
    bench.answers = [there]
    bench.texts = {"scheduler": "s", "worker b": "one\ntwo\n", "worker a": "joined"}
    with pytest.raises(ClusterError) as error:
        bench.wait.until_ready(asked)
    quotes = str(error.value).removeprefix(told)
    assert str(error.value).startswith(told) and "last lines of worker b:\n  one\n  two" in quotes
    assert bench.now == 100.0 and "scheduler" not in quotes and (there[0]["name"] == "h" or "joined" not in quotes)


def test_slots_that_do_not_come_are_told_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch, workers=3, timeout_s=5.0)
    bench.answers = [[worker("a"), worker("b", 1), worker("c", host="c")][:2]]
    with pytest.raises(
        ClusterError, match=r"^3 workers ordered, 2 joined with 3 slots \(2 from a \(h\), 1 from b \(h\)\) wi"
    ):
        bench.wait.until_ready(None)
    assert bench.now == pytest.approx(105.0, abs=0.05)


@pytest.mark.parametrize(("timeout_s", "ends_at"), [(5.0, 105.0), (0.0, 101.0)])
def test_deadline_counts_from_the_begin_but_leaves_a_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, ends_at: float
) -> None:
    assert Bench(tmp_path, monkeypatch, timeout_s=timeout_s).wait.deadline == ends_at


def test_part_that_has_failed_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = WithFaults(tmp_path, monkeypatch, workers=1)
    original = bench._sleep

    def sleep(seconds: float) -> None:
        original(seconds)
        bench.why = "job 17 has ended" if bench.now > 103.5 else None

    monkeypatch.setattr(wait_ready, "time", SimpleNamespace(monotonic=lambda: bench.now, sleep=sleep))
    with pytest.raises(ClusterError, match=r"^1 worker ordered, 0 joined with 0 slots: job 17 has ended$"):
        bench.wait.until_ready(None)
    assert [round(at) for at in bench.asked_faults] == [102, 104], "each question costs a call"


def test_provider_without_faults_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_ready.fault(cast(Provider, object()), Bench(tmp_path, monkeypatch).cluster) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ValueError("no GPU"), r"^the worker on a \(h\) can't be used: ValueError\('no GPU'\)$"),
        ({**WARM, "fault": "disk full"}, r"^the worker on a \(h\) can't be used: disk full$"),
    ],
)
def test_worker_that_cant_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, told: str
) -> None:
    bench = Bench(tmp_path, monkeypatch, workers=1)
    bench.answers = [[worker("a")]]
    bench.warmth = [{"tcp://a": answer}]
    with pytest.raises(ClusterError, match=told):
        bench.wait.until_ready(None)


def test_cluster_has_shrunk_when_only_slots_in_use_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch)
    bench.answers = [[worker("a", 4), worker("b", 4)], [worker("a", 4, held=3)], [worker("a", 3, held=3)]]
    assert bench.wait.until_shrunk(1).slots == 3
    bench.answers = [[worker("a", 2)]]
    assert bench.wait.until_shrunk(2).slots == 2
    with pytest.raises(ClusterError, match=r"^2 slots left, 1 requested, within 60 s$"):
        bench.wait.until_shrunk(1)


def test_last_words_are_those_of_processes_that_have_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch)
    bench.texts = {"scheduler": "s\n", "worker a": " \n", "worker b": "b\nc"}
    provider = cast(Provider, bench)
    both = "last lines of scheduler:\n  s\nlast lines of worker b:\n  b\n  c"
    assert last_words(provider, bench.cluster) == both
    bench.answers = [[]]
    assert last_words(provider, bench.cluster, bench.wait.view()) == both
    bench.answers = [[worker("x", host="b")]]
    assert last_words(provider, bench.cluster, bench.wait.view()) == ""


def test_connection_is_closed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, closed = Bench(tmp_path, monkeypatch), list[float]()
    bench.wait._client = cast(Any, SimpleNamespace(close=lambda *, timeout: closed.append(timeout)))
    with bench.wait:
        pass
    assert closed == [2.0]


def test_scheduler_without_ddptrain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> None:
        raise ImportError("No module named ddptrain")

    bench = Bench(tmp_path, monkeypatch)
    monkeypatch.setattr(bench, "run_on_scheduler", fail)
    with pytest.raises(
        ClusterError, match=r"^the scheduler at tcp://s can't be used \(No module named ddptrain\): install"
    ):
        bench.wait.view()


def test_address_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch, timeout_s=5.0)
    bench.cluster.update(address="")
    with pytest.raises(ClusterError, match=r"^no scheduler has come up within 5 s$"):
        bench.wait._target()
    bench.cluster.update(address="tcp://s:1")
    assert bench.wait._target().address == "tcp://s:1"


def test_connection_has_the_security_of_the_cluster_and_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, timeout_s=60.0)
    monkeypatch.setattr(
        wait_ready, "of_deployment", lambda deployment: SimpleNamespace(address="tls://s", security="k")
    )
    monkeypatch.setattr("distributed.Client", lambda address, **options: (address, options))
    expected = {"security": "k", "timeout": 60.0, "name": "ddptrain-up", "set_as_default": False}
    assert cast(Any, bench.wait._connected()) == ("tls://s", expected)
    bench.now = 159.5
    assert cast(Any, bench.wait._connected())[1]["timeout"] == 1.0 and bench.told == ["scheduler at tls://s"]
