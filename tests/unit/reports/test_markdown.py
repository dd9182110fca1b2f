"""Reports in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt

from ddptrain.errors import ClusterError, ConfigError, Problem
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.reports.facts import RunReport, StageReport
from ddptrain.reports.markdown import cell, code, fenced, link, markdown, sparkline, table
from ddptrain.results.run_record import BestRecord, FailureRecord, GitRecord
from tests.unit.reports.runs import TRACE, failed_run, run

# --- Reports as Markdown ---


JOB = {
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "o/r",
    "GITHUB_SHA": "0123abc",
    "GITHUB_RUN_ID": "42",
}


def text_of(report: RunReport, folder: Path, limit: int = 65_536, environ: Mapping[str, str] | None = None) -> str:
    return markdown(replace(report, workspace=folder), environ or {}, limit)


def test_run_that_succeeded(tmp_path: Path) -> None:
    view = run(
        tmp_path,
        curves={"val/loss": [2.0, 1.0]},
        last_metrics={"val/loss": 1.0, "samples": 12345.0, "odd": None},
        best=BestRecord("val/loss", "min", 1.0, 1),
        git=GitRecord("0123456789abcdef", dirty=True),
        tracking={"wandb": {"url": "https://wandb.ai/a/b"}, "wandb/rank_1": {"url": "https://wandb.ai/a/b"}},
    )
    where = tmp_path / "toy-1"
    text = text_of(RunReport.of_run(view), tmp_path)
    assert (
        text
        == f"""## ✅ `toy`: succeeded

run `toy-1` · exit code 0 · 2 ranks · 4.2 s · commit `0123456789ab` with changes

[W&B run](https://wandb.ai/a/b) · run directory `{where}`

### Metrics

| metric | last | curve |
| --- | --- | --- |
| `odd` | nan |  |
| `samples` | 12,345 |  |
| `val/loss` | 1 | █▁ |

best `val/loss` 1 at step 1

Look further with `ddptrain results show {where}`
"""
    )


def test_tags_and_the_note_are_shown_without_markup(tmp_path: Path) -> None:
    view = run(tmp_path)
    (view.root / "annotations.json").write_text('{"tags": ["good", "v2"], "note": "<b>@all</b>\\nmore"}')
    text = text_of(RunReport.of_run(view), tmp_path)
    assert "\n\ntags `good` `v2` · note `<b>@all</b>" in text
    assert "<b>" not in MarkdownIt().render(text)


def test_run_that_failed(tmp_path: Path) -> None:
    text = text_of(RunReport.of_run(failed_run(tmp_path)), tmp_path, environ=JOB)
    assert (
        text
        == f"""## ❌ `toy`: failed

`rank 1 on node-1: ValueError: wrong shape`

at [`train.py:4`](https://github.com/o/r/blob/0123abc/train.py#L4)

run `toy-1` · exit code 1 · 3 ranks · 4.2 s

run directory `{tmp_path}/toy-1` · [CI job](https://github.com/o/r/actions/runs/42)

<details><summary>Traceback of rank 1</summary>

```text
{TRACE.format(folder=tmp_path)}```

</details>

<details><summary>Last lines of rank 1</summary>

```text
step 1
ValueError: wrong shape
```

</details>

Look further with `ddptrain results show {tmp_path}/toy-1`
"""
    )


def test_gitlab_names_its_job_and_commit(tmp_path: Path) -> None:
    view = failed_run(tmp_path)
    job = {
        "CI_PROJECT_URL": "https://gitlab.com/o/r",
        "CI_COMMIT_SHA": "0123abc",
        "CI_JOB_URL": "https://gitlab.com/j/1",
    }
    text = text_of(RunReport.of_run(view), tmp_path, environ=job)
    assert "[`train.py:4`](https://gitlab.com/o/r/-/blob/0123abc/train.py#L4)" in text
    assert "[CI job](https://gitlab.com/j/1)" in text


def test_retraining_is_compared_with_the_champion(tmp_path: Path) -> None:
    retraining = RetrainRecord(
        1,
        "petnames",
        "",
        version=4,
        champion=3,
        scores={"candidate": {"val/loss": 2.2, "new": 1.0, "zero": 1.0}, "champion": {"val/loss": 2.0, "zero": 0.0}},
        gate=(GateOutcome("val/loss", False, "val/loss 2.2 is worse"), GateOutcome("a", True, "a | b")),
        difference=("+312 images", "class pug is missing"),
    )
    report = RunReport(
        "petnames",
        "rejected",
        7,
        "val/loss 2.2 is not better than 2.0",
        run(tmp_path),
        retraining=retraining,
        stages=[
            StageReport("train", "done", 61.0),
            StageReport("gate", "failed", 0.0, "rejected"),
            StageReport("promote", "skipped"),
        ],
    )
    text = text_of(report, tmp_path)
    assert text.startswith("## ⚠️ `petnames` version 4: rejected\n\n`val/loss 2.2 is not better than 2.0`\n")
    assert (
        """### Comparison

| metric | candidate (version 4) | champion (version 3) | change |
| --- | --- | --- | --- |
| `val/loss` | 2.2 | 2 | +0.2 (+10.0%) |
| `new` | 1 | - | - |
| `zero` | 1 | 0 | +1 |

|  | gate |
| --- | --- |
| ❌ | `val/loss 2.2 is worse` |
| ✅ | `a \\| b` |

Training data: `+312 images`, `class pug is missing`
"""
        in text
    )
    assert (
        """### Stages

|  | stage | time |  |
| --- | --- | --- | --- |
| ✅ | train | 1m 01s |  |
| ❌ | gate | 0.0 s | `rejected` |
"""
        in text
    )


def test_problems_of_a_configuration_are_listed(tmp_path: Path) -> None:
    problems = [Problem(f"a.yaml:{line}", "x", f"is wrong {line}") for line in range(1, 23)]
    text = text_of(RunReport.of_error("a", ConfigError(problems)), tmp_path)
    assert text.startswith("## ❌ `a`: failed\n\n`the configuration has 22 problems`\n\n- `a.yaml:1: x: is wrong 1`\n")
    assert "is wrong 20`\n\nand 2 more problems\n\nexit code 2\n" in text


def test_error_without_a_run(tmp_path: Path) -> None:
    report = RunReport.of_error("toy", ClusterError("no cluster at tcp://user:secretword@host:1\nmore"))
    text = text_of(report, tmp_path)
    assert text == "## ❌ `toy`: failed\n\n`no cluster at tcp://<left out>@host:1`\n\nexit code 4\n"


@pytest.mark.parametrize("limit", [400, 700, 1000, 2000, 5000])
def test_report_that_is_too_long_is_cut_between_blocks(tmp_path: Path, limit: int) -> None:
    log = "".join(f"line {number} é\n" for number in range(100))
    trace = TRACE.format(folder=tmp_path) * 100
    failure = FailureRecord(1, "node-1", "exception", "ValueError", "x" * 200, trace)
    view = failed_run(tmp_path, failure=failure, logs={1: log}, last_metrics={f"m{i}": 1.0 for i in range(60)})
    text = text_of(RunReport.of_run(view), tmp_path, limit)
    assert 0 < len(text.encode()) <= limit
    note = "_The rest was left out, because the report would be too long"
    assert text.splitlines()[-1].startswith(note)
    assert text.count("<details>") == text.count("</details>")
    fences = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
    assert len(fences) == text.count("<details>")


def test_longest_report_fits_into_a_comment(tmp_path: Path) -> None:
    log = ("é" * 2000 + "\n") * 100
    trace = "é" * 20_000
    faults = [{"event": "fault", "rank": rank, "message": str(rank), "victim": False} for rank in range(8)]
    view = run(
        tmp_path,
        "failed",
        [1] * 8,
        faults,
        dict.fromkeys(range(8), log),
        failure=FailureRecord(3, "h", "exception", "E", "m" * 10_000, trace),
        last_metrics={f"metric-{number}" * 30: 1.0 for number in range(500)},
    )
    text = text_of(RunReport.of_run(view), tmp_path)
    assert 30_000 < len(text.encode()) <= 65_536
    assert "The rest was left out" not in text
    assert text.index("Last lines of rank 3") < text.index("Last lines of rank 0")  # the root cause comes first
    assert "Last lines of rank 4" not in text
    assert "\n\nAlso failed: rank 4, 5, 6, 7\n\n" in text


def test_mistake_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    faults = [{"event": "fault", "rank": rank, "message": "boom", "victim": False} for rank in range(40)]
    logs = dict.fromkeys(range(40), "boom\n")
    view = run(tmp_path, "failed", [1] * 40, faults, logs, failure=FailureRecord(7, "h", "exception", "E", "boom"))
    text = text_of(RunReport.of_run(view), tmp_path)
    assert re.findall(r"Last lines of rank \d+", text) == ["Last lines of rank 7"]
    shown = ", ".join(str(rank) for rank in range(21) if rank != 7)
    assert f"\n\nAlso failed: rank {shown} and 19 more ranks\n" in text


def test_damaged_metrics_do_not_stop_a_report(tmp_path: Path) -> None:
    view = run(tmp_path, curves={"loss": [1.0, 2.0]}, last_metrics={"loss": 2.0})
    view.metrics_jsonl.unlink()
    assert "| `loss` | 2 |  |" in text_of(RunReport.of_run(view), tmp_path)
    view.metrics_jsonl.mkdir()
    assert "The curves cannot be shown: `cannot read" in text_of(RunReport.of_run(view), tmp_path)


def test_credentials_of_logs_and_tracebacks_are_left_out(tmp_path: Path) -> None:
    failure = FailureRecord(1, "h", "exception", "E", "password=hunter22", "E: token=hunter22\n")
    view = failed_run(tmp_path, failure=failure, logs={1: "api_key=hunter22\nhunter33\n"})
    text = text_of(RunReport.of_run(view, secrets=("hunter33",)), tmp_path)
    assert "hunter" not in text
    assert text.count("<left out>") == 4


# --- Text of others does not become Markdown ---


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a", "`a`"),
        ("", "`-`"),
        ("  ", "`-`"),
        ("a`b", "``a`b``"),
        ("`a``b", "``` `a``b ```"),
        ("a\nb\x1b[0m", "`a\\u000ab\\u001b[0m`"),
        ("@user <b> [x](y) | *z*", "`@user <b> [x](y) | *z*`"),
    ],
)
def test_code_is_one_span(text: str, markdown: str) -> None:
    assert code(text) == markdown


@pytest.mark.parametrize("text", ["a|b", "`|`", "| --- |", "<script>", "x\\|y", "**b**"])
def test_cell_keeps_its_table(text: str) -> None:
    html = MarkdownIt().enable("table").render(table(("a", "b"), [[cell(text), "1"]]))
    assert html.count("<td>") == 2
    shown = text.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<code>{shown}</code>" in html


def test_fence_is_longer_than_those_inside() -> None:
    html = MarkdownIt().render(fenced("a\n```\n# b\n````\n<b>\x1b"))
    assert (
        html
        == '<pre><code class="language-text">a\n```\n# b\n````\n&lt;b&gt;\N{REPLACEMENT CHARACTER}\n</code></pre>\n'
    )


@pytest.mark.parametrize("url", ["javascript:alert(1)", "https://a b", "https://a)", "https://a|b", "http://a\n"])
def test_only_plain_addresses_become_links(url: str) -> None:
    assert "](" not in link("x", url)
    assert link("x", "https://wandb.ai/a/b") == "[x](https://wandb.ai/a/b)"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([1.0, math.nan, 0.0, math.inf], "█▁"),
        ([2.0, 2.0, 2.0], "▁▁▁"),
        ([1.0], ""),
        ([math.nan, math.nan], ""),
        ([float(value) for value in range(48)], "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(np.array(values)) == line
