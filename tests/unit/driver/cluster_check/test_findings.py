"""Comparison with the median."""

from __future__ import annotations

from ddptrain.driver.cluster_check.findings import Finding, Level, Limits, below_median, usual

LIMITS = Limits(bad=0.5, warning=0.8)


def test_value_below_its_part_of_the_median_is_named_with_the_median() -> None:
    values = {"a": 10.0, "b": 11.0, "c": 12.0, "d": 4.0, "e": 8.0}  # median 10
    found = list(below_median(values, "disk", "MB/s", LIMITS))
    assert found == [Finding(Level.BAD, "d", "disk", "4 MB/s, 40 % of the median of 5 (10)", of_limit=0.8)]
    assert [each.level for each in below_median({**values, "e": 7.9}, "disk", "MB/s", LIMITS)] == [
        Level.BAD,
        Level.WARNING,
    ]


def test_value_at_a_limit_is_on_its_good_side() -> None:
    values = {"a": 10.0, "b": 10.0, "c": 8.0, "d": 5.0, "e": 10.0}
    text = "5 MB/s, 50 % of the median of 5 (10)"
    assert list(below_median(values, "disk", "MB/s", LIMITS, hint="look")) == [
        Finding(Level.WARNING, "d", "disk", text, "look", of_limit=1.0)
    ]
    assert list(below_median({"a": 0.0, "b": 0.0, "c": -1.0}, "disk", "MB/s", LIMITS)) == []


def test_value_that_is_never_bad_is_only_a_warning() -> None:
    (found,) = below_median({"a": 10.0, "b": 10.0, "c": 1.0}, "memory", "MB", Limits(bad=0.0, warning=0.7))
    assert (found.level, found.host, found.of_limit) == (Level.WARNING, "c", 0.0)


def test_two_hosts_are_not_compared() -> None:
    assert list(below_median({"a": 10.0, "b": 0.1}, "disk", "MB/s", LIMITS)) == []


def test_usual_value_is_that_of_most_hosts() -> None:
    assert usual(["1", "2", "1"]) == "1"
    assert usual(["1", "2"]) is None
    assert usual([]) is None
