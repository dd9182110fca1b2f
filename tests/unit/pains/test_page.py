"""The page of problems has the problems of the bench, with the same text."""

from __future__ import annotations

import re

import pytest

from tests.pains.__main__ import differences
from tests.pains.catalogue import PROBLEMS
from tests.pains.page import PAGE, fixed_parts, names_of, page_with, section_of
from tests.pains.problem import Problem, Show, run

TEXT = PAGE.read_text(encoding="utf-8")
SMALL = Problem(
    name="small",
    title="Title",
    happens="It happens.",
    threads=("a/b#1",),
    files={"train.py": "\npass\n"},
    peer=Show(run("true"), must=("bad",), keep=("bad",)),
    ours=Show(run("true"), must=("good",), verdict="Verdict."),
    avoided="Avoided.",
    equal="Also good.",
)
SECTION = """<!-- problem: small -->

## Title

It happens. Reported in [b#1](https://github.com/a/b/issues/1).

<details markdown="1"><summary>The script</summary>

```python title="train.py"
pass
```

</details>

**torchrun**

```text
$ a
...
bad
```

**ddptrain**

```text
$ b
good
```

Verdict.

**How ddptrain avoids it.** Avoided.

**Equally good.** Also good.
"""


def test_page_has_each_problem_once_and_no_other() -> None:
    names = [problem.name for problem in PROBLEMS]
    assert names_of(TEXT) == names
    assert len(names) >= 20 and len(set(names)) == len(names)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem.name))
def test_page_says_what_the_problem_says(problem: Problem) -> None:
    start = TEXT.index(f"<!-- problem: {problem.name} -->")
    section = TEXT[start:].split("<!-- problem: ", 2)[1]
    assert [part for part in fixed_parts(problem) if part not in section] == [], "run: make bench-pains ARGS=--write"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem.name))
def test_problem_names_threads_and_claims_something(problem: Problem) -> None:
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in problem.threads) and problem.threads
    assert problem.peer.must and problem.ours.must and "](" in problem.avoided


def test_a_section_is_made_of_the_problem_and_of_both_outputs() -> None:
    assert section_of(SMALL, ["$ a", "noise", "bad"], ["$ b", "good"]) == SECTION


def test_one_section_is_written_anew_and_the_others_stay_in_order() -> None:
    old = "Introduction\n\n<!-- problem: b -->\nold b\n\n<!-- problem: gone -->\nx\n"
    page = page_with(old, {"a": "<!-- problem: a -->\nnew a\n"}, ["a", "b", "c"])
    assert page.endswith("\n\n<!-- problem: a -->\nnew a\n\n<!-- problem: b -->\nold b\n")
    assert names_of(page) == ["a", "b"]


def test_claims_that_do_not_hold_are_told() -> None:
    show = Show(run("true"), must=("^step 2$", "step 9"), never=("Error",))
    assert differences(show, "step 1\nstep 2\nan Error") == ["not found: step 9", "found: Error"]
    assert differences(show, "step 2\nstep 9") == []
