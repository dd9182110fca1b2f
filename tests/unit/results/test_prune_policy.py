"""Which runs go: a table of cases, and properties over random runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.results.prune import Decision, PrunePolicy, RunFacts, decide, size_bytes

DAY_S = 86_400.0
ALL = PrunePolicy(keep=0, failed_keep=0)


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
        ([], PrunePolicy(), ""),
        (S, PrunePolicy(), ""),
        (S, PrunePolicy(keep=5), ""),
        (S, PrunePolicy(keep=4), "s4"),
        (S, PrunePolicy(keep=1), "s1 s2 s3 s4"),
        (S, ALL, "s0 s1 s2 s3 s4"),
        # The others have a number of their own.
        ([*F, *S], PrunePolicy(keep=5, failed_keep=1), "f1 f2 f3"),
        ([*F, *S], PrunePolicy(keep=1, failed_keep=4), "s1 s2 s3 s4"),
        ([run("p", "preempted"), run("c", "cancelled"), run("f", "failed")], PrunePolicy(failed_keep=2), "f"),
        # Each name has its own.
        ([run("a"), run("b", name="dogs"), run("c"), run("d", name="dogs")], PrunePolicy(keep=1), "c d"),
        ([run("a"), run("b", name="dogs"), run("c"), run("d", name="dogs")], PrunePolicy(keep=0, name="dogs"), "b d"),
        # Age: only what is older than the limit goes.
        (S, PrunePolicy(keep=0, older_than_s=2.5 * DAY_S), "s3 s4"),
        (S, PrunePolicy(keep=0, older_than_s=3 * DAY_S), "s4"),
        (S, PrunePolicy(keep=4, older_than_s=0.5 * DAY_S), "s4"),
        (S, PrunePolicy(keep=5, older_than_s=0.0), ""),
        # Size: the oldest first, whatever the other fields keep.
        (S, PrunePolicy(max_size_bytes=50), ""),
        (S, PrunePolicy(max_size_bytes=49), "s4"),
        (S, PrunePolicy(max_size_bytes=21), "s2 s3 s4"),
        (S, PrunePolicy(max_size_bytes=0), "s0 s1 s2 s3 s4"),
        (S, PrunePolicy(keep=3, max_size_bytes=30), "s3 s4"),
        (S, PrunePolicy(older_than_s=99 * DAY_S, max_size_bytes=30), "s3 s4"),
        ([run("new", size=5), run("empty", size=0), run("old", size=9)], PrunePolicy(max_size_bytes=5), "old"),
        # What is not known to have ended stays.
        ([run("a", "running")], ALL, ""),
        ([run("a", "unknown")], ALL, ""),
        ([run("a", "unreadable", problem="cannot read it")], ALL, ""),
        ([run("a", problem="cannot read it")], ALL, ""),
        ([run("a", "paused")], ALL, ""),  # a status of a newer version
        ([run("a", foreign="of another user")], ALL, ""),
        ([run("a", "running", size=99), run("b")], PrunePolicy(max_size_bytes=0), "b"),
        # What --resume auto would continue stays: the newest run of a name, with a checkpoint.
        ([run("a", "failed", has_checkpoint=True)], ALL, ""),
        ([run("a", "preempted", has_checkpoint=True)], ALL, ""),
        ([run("a", "cancelled", has_checkpoint=True)], ALL, ""),
        ([run("a", "failed")], ALL, "a"),
        ([run("a"), run("b", "failed", has_checkpoint=True)], ALL, "a b"),
        ([run("a", "failed"), run("b", "failed", has_checkpoint=True)], ALL, "a b"),
        ([run("a", "failed", has_checkpoint=True), run("b", "failed", has_checkpoint=True)], ALL, "b"),
        ([run("a", "running"), run("b", "failed", has_checkpoint=True)], ALL, "b"),
        ([run("a", foreign="of another user"), run("b", "failed", has_checkpoint=True)], ALL, ""),
        ([run("a", problem="cannot read it"), run("b", "failed", has_checkpoint=True)], ALL, ""),
        ([run("a", name="dogs"), run("b", "failed", has_checkpoint=True)], ALL, "a"),
        ([run("a", "failed", has_checkpoint=True)], PrunePolicy(max_size_bytes=0), ""),
    ],
)
def test_runs_that_go(runs: list[RunFacts], policy: PrunePolicy, expected: str) -> None:
    assert gone(runs, policy) == expected


def test_protected_runs_stay_and_count() -> None:
    assert gone(S, PrunePolicy(keep=2), {"s4": "champion of pets"}) == "s2 s3"
    assert gone(S, PrunePolicy(keep=2), {"s0": "champion of pets"}) == "s2 s3 s4"
    assert gone(S, PrunePolicy(max_size_bytes=0), {"s3": "pinned of pets"}) == "s0 s1 s2 s4"


def test_run_is_protected_by_the_id_in_its_record_and_by_its_folder() -> None:
    moved = run("copy", run_id="original")
    assert gone([moved], ALL, {"original": "champion of pets"}) == ""
    assert gone([moved], ALL, {"copy": "champion of pets"}) == ""
    assert gone([moved], ALL, {"other": "champion of pets"}) == "copy"


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


@given(RUNS, POLICIES, PROTECTED)
def test_second_prune_with_the_same_policy_deletes_nothing(
    runs: list[RunFacts], policy: PrunePolicy, protected: Mapping[str, str]
) -> None:
    left = [run for run in runs if run.folder not in gone(runs, policy, protected).split()]
    again: list[Decision] = decide(left, policy, protected)
    assert not [each for each in again if each.goes]


@given(RUNS, POLICIES, PROTECTED)
def test_keeping_more_never_deletes_more(
    runs: list[RunFacts], policy: PrunePolicy, protected: Mapping[str, str]
) -> None:
    policy = dataclasses.replace(policy, max_size_bytes=None)
    more = dataclasses.replace(policy, keep=policy.keep + 1, failed_keep=policy.failed_keep + 1)
    assert set(gone(runs, more, protected).split()) <= set(gone(runs, policy, protected).split())


# --- Sizes ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("500MB", 500_000_000),
        ("200GB", 200_000_000_000),
        ("200 gb", 200_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("2KiB", 2048),
        ("1GiB", 1_073_741_824),
        ("7B", 7),
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
