"""The text of `ddptrain explain CODE`."""

from __future__ import annotations

import pytest

from ddptrain.errors import ExitCode
from ddptrain.explain import EXPLANATIONS, as_text, causes_of, explanation_of


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_explained(code: ExitCode) -> None:
    text = as_text(code)
    assert text[0].startswith(f"exit code {int(code)}: ") and len(text) > 1
    assert EXPLANATIONS[code].causes or code == ExitCode.SUCCEEDED


def test_causes_stand_with_what_to_do() -> None:
    text = "\n".join(as_text(ExitCode.LOCKED))
    assert "  - its driver on another host is silent\n    -> wait: the lock ends by itself" in text


def test_explanation_is_short_unless_all_is_asked_for() -> None:
    short = as_text(ExitCode.CLUSTER)
    assert sum(line.startswith("    -> ") for line in short) == 3
    causes = sum(line.startswith("    -> ") for line in as_text(ExitCode.CLUSTER, complete=True))
    assert short[-1].startswith(f"{causes - 3} more causes: ddptrain explain 4 --all.")
    assert as_text(ExitCode.INTERRUPTED)[6].startswith("  - Ctrl-C, or a second signal, which does")
    assert as_text(ExitCode.LOCKED)[-1] == "The lock ends with its process. There is no lock file to delete."


@pytest.mark.parametrize(
    ("code", "root_cause", "found"),
    [
        (1, "rank 0 on vm: killed by SIGKILL", ["killed by SIGKILL: often the kernel"]),
        (1, "rank 0 on vm: torch.OutOfMemoryError: CUDA out of memory", ["an exception", "CUDA out of memory"]),
        (4, "StoreError: s3://bucket/runs does not answer", ["a store"]),
        (4, "ResultsError: runs/x: No space left on device", ["disk full"]),
        (4, "its events or log have reached the limit on the size of files: ulimit -f", ["disk full"]),
        (4, "something else", ["too few free slots", "no scheduler answers", "a worker was lost"]),
        (130, "SIGINT: the driver was sent SIGINT", ["Ctrl-C"]),
        (143, "ended by ddptrain stop", ["the signal came before", "the function does not call ctx.checkpoint"]),
    ],
)
def test_causes_that_fit_the_root_cause_are_chosen(code: int, root_cause: str, found: list[str]) -> None:
    causes = [each.cause for each in causes_of(code, root_cause)]
    assert len(causes) == len(found) and all(map(str.startswith, causes, found)), causes


def test_codes_of_others_are_named() -> None:
    assert as_text(137)[0] == "exit code 137: ddptrain itself was killed by SIGKILL"
    assert explanation_of(139).title == "ended by SIGSEGV"
    assert explanation_of(42).remarks == "Its exit codes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 75, 129, 130, 131, 143, 137, 141."
