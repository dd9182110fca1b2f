"""What prune deletes, here and in a store."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import PermissionDeniedError

from ddptrain.errors import RunLocked
from ddptrain.results.layout import PRUNED
from ddptrain.results.prune import (
    PrunePolicy,
    RunFacts,
    decide,
    prune,
    size_bytes,
)
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.remote.stored_runs import StoredRuns
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns
from ddptrain.results.show.render import size
from ddptrain.storage.object_store import ObjectStore
from tests.unit.results.stores import WatchedStore, watched_store

# --- Runs in a folder are deleted: completely or not at all, and only those that nobody uses ---


Driver = Callable[[str], subprocess.Popen[str]]
ALL = PrunePolicy(keep=0, failed_keep=0)


def put(runs: Path, run_id: str, status: str = "succeeded", day: int = 1, **fields: object) -> Path:
    """A run directory of 1,000 bytes and a run.json."""
    layout = Run(runs / run_id)
    folder = layout.checkpoints_dir / "step-1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * 600)
    (folder / "checkpoint.json").write_bytes(b" " * 100)
    layout.logs_dir.mkdir()
    layout.log(0).write_bytes(b"l" * 300)
    record = RunRecord(run_id=run_id, name="pets", status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    layout.run_json.write_text(dataclasses.replace(record, **fields).to_json())  # type: ignore[arg-type]
    return layout.root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_old_runs_are_deleted_and_counted(runs: Path) -> None:
    old, new = put(runs, "old", day=1), put(runs, "new", day=2)
    size = 1000 + (old / "run.json").stat().st_size
    report = prune(LocalRuns(runs), PrunePolicy(keep=1))
    assert [(each.run.folder, each.run.size_bytes, each.reason) for each in report.removed] == [
        ("old", size, "1 newer successful run")
    ]
    assert report.freed_bytes == size and report.kept_bytes == 1000 + (new / "run.json").stat().st_size
    assert os.listdir(runs) == ["new"] and not report.problems


def test_dry_run_changes_nothing(runs: Path) -> None:
    put(runs, "old")
    before = sorted(runs.rglob("*"))
    report = prune(LocalRuns(runs), ALL, dry_run=True)
    assert [each.run.folder for each in report.removed] == ["old"]
    assert sorted(runs.rglob("*")) == before
    assert report.summary == f"1 run would be deleted, {size(report.freed_bytes)} would be freed"


def test_running_run_stays(runs: Path, driver: Driver) -> None:
    process = driver("a-run")
    assert not prune(LocalRuns(runs), ALL).removed
    process.kill()
    process.wait()
    report = prune(LocalRuns(runs), ALL)
    assert [(each.run.folder, each.run.status) for each in report.removed] == [("a-run", "failed")]
    assert os.listdir(runs) == []


def test_run_that_is_resumed_after_the_decision_stays(runs: Path) -> None:
    folder = put(runs, "night", "failed", day=1)
    put(runs, "newer", day=2)
    [seen] = [view for view in LocalRuns(runs).list() if view.run_id == "night"]
    with RunWriter.reopen(folder, "", seen.record.driver) as writer:
        with pytest.raises(RunLocked, match="held by process"):
            LocalRuns(runs).delete(seen)
        report = prune(LocalRuns(runs), ALL)
        assert [(each.run.folder, each.reason) for each in report.kept] == [("night", "running")]
        writer.finish(RunStatus.FAILED, 1)
    resumed = dataclasses.replace(writer.record, driver=dataclasses.replace(writer.record.driver, pid=1))
    Run(folder).run_json.write_text(resumed.to_json())
    with pytest.raises(RunLocked, match="has changed since it was chosen"):
        LocalRuns(runs).delete(seen)
    assert (folder / "checkpoints/step-1/model.safetensors").is_file()


def test_two_prunes_at_once_delete_everything_without_a_problem(runs: Path) -> None:
    for day in range(1, 21):
        put(runs, f"run-{day}", day=day)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: prune(LocalRuns(runs), PrunePolicy(keep=2)), range(4)))
    assert sorted(os.listdir(runs)) == ["run-19", "run-20"]
    assert [report.problems for report in reports] == [()] * 4


def test_leftover_of_a_killed_prune_is_no_run_and_is_finished(runs: Path) -> None:
    folder = put(runs, "night")
    aside = folder.rename(runs / f"{PRUNED}night-00112233")
    assert LocalRuns(runs).list() == []
    told = prune(LocalRuns(runs), PrunePolicy(), dry_run=True)
    assert told.finished_bytes.keys() == {aside.name} and aside.exists()
    report = prune(LocalRuns(runs), PrunePolicy(name="other"))
    assert report.freed_bytes == told.freed_bytes > 1000
    assert os.listdir(runs) == []


def test_symbolic_links_are_neither_deleted_nor_followed(runs: Path, tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere", "linked")
    inside = put(runs, "pets-1")
    (runs / "linked").symlink_to(elsewhere)
    (inside / "artifacts").symlink_to(elsewhere)
    report = prune(LocalRuns(runs), ALL)
    assert [(each.run.folder, each.reason) for each in report.kept] == [("linked", "a symbolic link")]
    assert os.listdir(runs) == ["linked"] and (elsewhere / "checkpoints/step-1/model.safetensors").is_file()


def test_run_of_another_user_stays(runs: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    os.chown(put(runs, "theirs"), 12345, -1)
    report = prune(LocalRuns(runs), PrunePolicy(keep=0, max_size_bytes=0))
    assert [(each.run.folder, each.reason) for each in report.kept] == [("theirs", "of another user")]


# --- Which runs go: a table of cases, and properties over random runs ---


DAY_S = 86_400.0


def run(folder: str, status: str = "succeeded", age_d: float = 0.0, size: int = 10, **fields: object) -> RunFacts:
    facts = RunFacts(folder, folder, "pets", status, age_d * DAY_S, size)
    return dataclasses.replace(facts, **fields)  # type: ignore[arg-type]


def gone(runs: list[RunFacts], policy: PrunePolicy, protected: Mapping[str, str] | None = None) -> str:
    return " ".join(each.run.folder for each in decide(runs, policy, protected or {}) if each.goes)


S = [run(f"s{number}", age_d=number) for number in range(5)]  # newest first
F = [run(f"f{number}", "failed", age_d=number) for number in range(4)]


@pytest.mark.parametrize(
    ("runs", "policy", "expected"),
    [
        (S, PrunePolicy(), ""),
        (S, PrunePolicy(keep=4), "s4"),
        (S, ALL, "s0 s1 s2 s3 s4"),
        # The others have a number of their own.
        ([*F, *S], PrunePolicy(keep=5, failed_keep=1), "f1 f2 f3"),
        ([run("p", "preempted"), run("c", "cancelled"), run("f", "failed")], PrunePolicy(failed_keep=2), "f"),
        # Each name has its own.
        ([run("a"), run("b", name="dogs"), run("c"), run("d", name="dogs")], PrunePolicy(keep=1), "c d"),
        ([run("a"), run("b", name="dogs"), run("c"), run("d", name="dogs")], PrunePolicy(keep=0, name="dogs"), "b d"),
        # Age: only what is older than the limit goes.
        (S, PrunePolicy(keep=0, older_than_s=3 * DAY_S), "s4"),
        (S, PrunePolicy(keep=4, older_than_s=0.5 * DAY_S), "s4"),
        # Size: the oldest first, whatever the other fields keep.
        (S, PrunePolicy(max_size_bytes=50), ""),
        (S, PrunePolicy(max_size_bytes=49), "s4"),
        (S, PrunePolicy(keep=3, max_size_bytes=30), "s3 s4"),
        ([run("new", size=5), run("empty", size=0), run("old", size=9)], PrunePolicy(max_size_bytes=5), "old"),
        # What is not known to have ended stays.
        ([run("a", "running", size=99), run("b")], PrunePolicy(max_size_bytes=0), "b"),
        ([run("a", "paused")], ALL, ""),  # a status of a newer version
        ([run("a", problem="cannot read it")], ALL, ""),
        # What --resume auto would continue stays: the newest run of a name, with a checkpoint.
        ([run("a", "failed", has_checkpoint=True)], ALL, ""),
        ([run("a", "failed"), run("b", "failed", has_checkpoint=True)], ALL, "a b"),
        ([run("a", foreign="of another user"), run("b", "failed", has_checkpoint=True)], ALL, ""),
        ([run("a", name="dogs"), run("b", "failed", has_checkpoint=True)], ALL, "a"),
    ],
)
def test_runs_that_go(runs: list[RunFacts], policy: PrunePolicy, expected: str) -> None:
    assert gone(runs, policy) == expected


def test_protected_runs_stay_and_count() -> None:
    assert gone(S, PrunePolicy(keep=2), {"s4": "champion of pets"}) == "s2 s3"
    assert gone(S, PrunePolicy(keep=2), {"s0": "champion of pets"}) == "s2 s3 s4"
    assert gone(S, PrunePolicy(max_size_bytes=0), {"s3": "pinned of pets"}) == "s0 s1 s2 s4"


# --- Properties ---

FACTS = st.builds(
    RunFacts,
    folder=st.just(""),
    run_id=st.sampled_from(["x", "y", "z"]),
    name=st.sampled_from(["pets", "dogs"]),
    status=st.sampled_from(["succeeded", "failed", "preempted", "cancelled", "running", "unknown", "paused"]),
    age_s=st.floats(0, 1e7),
    size_bytes=st.integers(0, 10**12),
    has_checkpoint=st.booleans(),
    foreign=st.sampled_from(["", "", "", "of another user"]),
    problem=st.sampled_from(["", "", "", "torn"]),
)
RUNS = st.lists(FACTS, max_size=30).map(
    lambda found: [dataclasses.replace(each, folder=f"run-{number}") for number, each in enumerate(found)]
)
POLICIES = st.builds(
    PrunePolicy,
    keep=st.integers(0, 5),
    failed_keep=st.integers(0, 5),
    older_than_s=st.none() | st.floats(0, 1e7),
    max_size_bytes=st.none() | st.integers(0, 10**13),
    name=st.none() | st.sampled_from(["pets", "dogs"]),
)
PROTECTED = st.dictionaries(st.sampled_from(["x", "y", "run-0", "run-3"]), st.just("champion"), max_size=3)


def must_stay(runs: list[RunFacts], each: RunFacts, protected: Mapping[str, str]) -> bool:
    """Written again, in another way: what may never be deleted."""
    if each.foreign or each.problem or each.status not in {"succeeded", "failed", "preempted", "cancelled"}:
        return True
    if {each.run_id, each.folder} & set(protected):
        return True
    same_name = [other for other in runs if other.name == each.name and not other.foreign and not other.problem]
    return same_name[0] is each and each.status != "succeeded" and each.has_checkpoint


@given(RUNS, POLICIES, PROTECTED)
def test_what_must_stay_stays_under_every_policy(
    runs: list[RunFacts], policy: PrunePolicy, protected: Mapping[str, str]
) -> None:
    for each in decide(runs, policy, protected):
        assert each.reason
        assert not (each.goes and must_stay(runs, each.run, protected))
        assert policy.name in (None, each.run.name)


@given(RUNS, POLICIES, PROTECTED)
def test_size_limit_holds_unless_the_rest_is_protected(
    runs: list[RunFacts], policy: PrunePolicy, protected: Mapping[str, str]
) -> None:
    kept = [each.run for each in decide(runs, policy, protected) if not each.goes]
    if policy.max_size_bytes is not None and sum(each.size_bytes for each in kept) > policy.max_size_bytes:
        assert all(must_stay(runs, each, protected) for each in kept if each.size_bytes)


# --- Sizes ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("200 gb", 200_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("2KiB", 2048),
    ],
)
def test_size_is_read(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1e3", "5 XB", "5iB", "1GB2", "1,5GB", "nan", "\u0663GB", "9" * 400]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match='is not a size: write a number with KB, MB, GB or TB, as in "200GB"'):
        size_bytes(text)


# --- Runs in an object store are deleted: readers find a complete run or none, at whatever write the process dies ---


FILES = ("checkpoints/step-1/model.safetensors", "checkpoints/step-1/checkpoint.json", "logs/rank-0.log")


@pytest.fixture
def watched() -> tuple[ObjectStore, WatchedStore]:
    return watched_store()


@pytest.fixture
def fs(watched: tuple[ObjectStore, WatchedStore]) -> WatchedStore:
    """The store of the runs, whose calls may fail."""
    return watched[1]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: tuple[ObjectStore, WatchedStore]) -> StoredRuns:
    """An empty store, seen from a machine whose folders are below tmp_path."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return StoredRuns(watched[0])


def put_stored(stored: StoredRuns, run_id: str, status: str = "succeeded", day: int = 1, **fields: object) -> int:
    """Write a run; return its size in bytes."""
    record = RunRecord(run_id=run_id, name="pets", status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    files = dict.fromkeys(FILES, b"x" * 100)
    files["run.json"] = dataclasses.replace(record, **fields).to_json().encode()  # type: ignore[arg-type]
    for name, data in files.items():
        stored.store.write(f"{run_id}/{name}", data)
    return sum(map(len, files.values()))


def claim(stored: StoredRuns, run_id: str, **fields: object) -> None:
    """Write the lease of a driver of another machine."""
    mine = dataclasses.replace(Claim.of_this_process(), host="elsewhere", machine="elsewhere")
    changed = dataclasses.replace(mine, **fields)  # type: ignore[arg-type]
    stored.store.write(f"{run_id}/{LOCK}", json.dumps(dataclasses.asdict(changed)).encode())


def test_death_at_each_write_leaves_the_complete_run_or_none(stored: StoredRuns, fs: WatchedStore) -> None:
    seen = []
    for step in range(1, 100):
        put_stored(stored, "old")
        count = itertools.count(1)

        def fail(path: str, count: Iterator[int] = count, step: int = step) -> Exception | None:
            return PermissionDeniedError("dead") if next(count) >= step else None

        fs.fails = fail  # from this write on nothing arrives any more
        prune(stored, ALL)
        fs.fails = lambda path: None
        listed = [view.run_id for view in stored.list()]
        left = {path.partition("/")[2] for path in stored.store.files()} - {LOCK}
        assert left >= {*FILES, "run.json"} if listed else "run.json" not in left
        seen.append((bool(listed), bool(left)))
        if stored.store.read(f"old/{LOCK}") is not None:
            claim(stored, "old", released=True)  # as if the lease of the dead process had expired
        report = prune(stored, ALL)
        assert not report.problems
        assert set(stored.store.files()) <= {f"old/{LOCK}"}  # the lock alone is left if nothing else was
        if next(count) <= step:  # no write has failed
            break
    assert seen[0] == (True, True) and seen[-1] == (False, False) and (False, True) in seen


def test_run_with_a_living_driver_stays(stored: StoredRuns) -> None:
    put_stored(stored, "live", "running")
    claim(stored, "live")
    assert [(each.reason) for each in prune(stored, ALL).kept] == ["running"]
    put_stored(stored, "resumed", "failed", day=1)
    put_stored(stored, "newer", "failed", day=2)
    claim(stored, "resumed")  # resumed, and run.json is not written yet
    report = prune(stored, ALL)
    assert {each.run.folder: each.reason for each in report.kept}["resumed"] == "in use"
    assert stored.store.read("resumed/run.json") is not None and not report.problems


def test_leftover_is_no_run_and_is_finished_unless_its_prune_is_alive(stored: StoredRuns) -> None:
    put_stored(stored, "night")
    stored.store.remove("night/run.json")
    assert not prune(stored, ALL).finished_bytes  # no mark: perhaps a run that has just begun
    stored.store.write("night/.pruned.json", b"{}")
    claim(stored, "night")
    assert prune(stored, ALL).finished_bytes == {} and len(stored.store.files()) == 5
    claim(stored, "night", released=True)
    assert prune(stored, ALL, dry_run=True).finished_bytes.keys() == {"night"} and len(stored.store.files()) == 5
    assert prune(stored, ALL).freed_bytes > 300
    assert stored.store.files() == {}


def test_store_that_stops_answering_ends_the_prune_with_one_problem(stored: StoredRuns, fs: WatchedStore) -> None:
    for day in range(1, 5):
        put_stored(stored, f"run-{day}", day=day)
    fs.fails = lambda path: OSError("kind: Timeout") if "run-3/" in path else None
    report = prune(stored, ALL)
    assert [each.run.folder for each in report.removed] == ["run-4"] and len(report.problems) == 1
    assert {each.run.folder: each.reason for each in report.kept} == {
        "run-3": "cannot be deleted",
        "run-2": "the store does not answer",
        "run-1": "the store does not answer",
    }
