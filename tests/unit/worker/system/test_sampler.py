"""One thread samples all ranks of a host, and sends one message for each run."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from ddptrain.protocol import worker_notices
from ddptrain.protocol.system_metrics import HOST_METRICS, RANK_METRICS
from ddptrain.protocol.worker_notices import MAX_SAMPLED_RANKS, SystemSample
from ddptrain.worker.system.sampler import SampledRank, SystemSampler

Sent = queue.SimpleQueue[SystemSample]


def rank(number: int, sent: Sent, run_id: str = "a-run") -> SampledRank:
    return SampledRank(run_id, 1, number, os.getpgid(0), None, 0.2, sent.put)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_ranks_of_a_run_are_in_one_message(tmp_path: Path) -> None:
    sampler, sent = SystemSampler(tmp_path), Sent()
    for number in range(3):
        sampler.add(f"key-{number}", rank(number, sent))
    first, second = sent.get(timeout=60), sent.get(timeout=60)
    for number in range(3):
        sampler.remove(f"key-{number}")
    assert second.ranks.keys() == {"0", "1", "2"}
    assert second.time_ns > first.time_ns
    assert second.use.keys() <= HOST_METRICS.keys()
    assert second.ranks["0"].keys() <= RANK_METRICS.keys()
    assert {"cpu_percent", "memory_bytes", "disk_bytes"} <= second.use.keys()
    assert {"cpu_percent", "rss_bytes", "open_files"} <= second.ranks["0"].keys()
    assert worker_notices.decode(worker_notices.encode(second)) == second


def test_each_run_has_messages_of_its_own_and_the_thread_ends_with_the_last_rank(tmp_path: Path) -> None:
    sampler, one, other = SystemSampler(tmp_path), Sent(), Sent()
    sampler.add("a", rank(0, one))
    sampler.add("b", rank(0, other, "b-run"))
    assert one.get(timeout=60).ranks.keys() == other.get(timeout=60).ranks.keys() == {"0"}
    thread = sampler._thread
    assert thread is not None
    sampler.remove("a")
    sampler.remove("b")
    thread.join(60)
    assert not thread.is_alive()
    sampler.add("a", rank(5, one))
    while "5" not in one.get(timeout=60).ranks:
        pass
    sampler.remove("a")


def test_many_ranks_are_split_into_messages_of_limited_size(tmp_path: Path) -> None:
    sampler, sent = SystemSampler(tmp_path), Sent()
    count = MAX_SAMPLED_RANKS + 1
    for number in range(count):
        sampler.add(str(number), rank(number, sent))
    found: set[str] = set()
    while len(found) < count:
        sample = sent.get(timeout=60)
        assert len(sample.ranks) <= MAX_SAMPLED_RANKS
        found |= sample.ranks.keys()
    for number in range(count):
        sampler.remove(str(number))
