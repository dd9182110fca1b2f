"""A report as Markdown, for the summary of a CI step and for comments on pull requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from urllib.parse import quote

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import DdptrainError
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.redact import hide_credentials
from ddptrain.reports.facts import RunReport, SourceLine, StageReport
from ddptrain.results.lookup import RunView
from ddptrain.results.show.curves import Plot, whole_plot
from ddptrain.results.tracker_records import run_argument, tracker_outputs
from ddptrain.text_tables import clean, clean_line, duration

COMMENT_CHARACTERS = 65_536  # the longest comment that GitHub takes
_TRACEBACK_CHARACTERS = 8_000
_MOST_METRICS = 40
_MOST_PROBLEMS = 20
_MOST_OTHERS = 20
_CURVES_BYTES = 64 << 20  # a larger metrics.jsonl takes too long to read when a run ends
_SIGNS = {"": "✅", "warning": "⚠️", "error": "❌"}
_STAGE_SIGNS = {"done": "✅", "failed": "❌"}
_SHA = re.compile(r"[0-9a-f]{7,64}")
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_LONGEST_SPAN = 500
_LONGEST_LINK = 2000
_LINK = re.compile(r"https?://[^\s<>()\[\]`|\"'\\]+")


def markdown(report: RunReport, environ: Mapping[str, str], limit: int = COMMENT_CHARACTERS) -> str:
    """Return the report; blocks that do not fit into `limit` bytes are left out, from the end, with a note."""
    blocks = list(_blocks(report, environ))
    view = report.view
    more = f": see {code(view.layout.where)}" if view is not None else ""
    note = f"_The rest was left out, because the report would be too long{more}._"
    kept, room = [], limit - len(note.encode()) - 2
    for block in blocks:
        room -= len(block.encode()) + 2
        if room < 0:
            kept.append(note)
            break
        kept.append(block)
    text = "\n\n".join(kept) + "\n"
    return text if len(text.encode()) <= limit else ""


def _blocks(report: RunReport, environ: Mapping[str, str]) -> Iterator[str]:
    yield _heading(report)
    if report.cause:
        yield _cause(report, environ)
    yield from _problems(report)
    yield _about(report, environ)
    yield from _failure(report)
    yield from _model(report)
    if report.view is not None:
        yield from _metrics(report.view)
    if reached := [stage for stage in report.stages if stage.status != "skipped"]:
        yield "### Stages"
        yield _stages(reached)
    if report.view is not None:
        yield f"Look further with `ddptrain results show {run_argument(report.view.layout)}`"


def _heading(report: RunReport) -> str:
    name = code(report.model or report.name)
    version = f" version {report.version}" if report.version is not None else ""
    return f"## {_SIGNS[report.level]} {name}{version}: {report.status}"


def _cause(report: RunReport, environ: Mapping[str, str]) -> str:
    cause = code(hide_credentials(report.cause))
    if report.source is None:
        return cause
    place, url = code(str(report.source)), _source_url(report.source, environ)
    return f"{cause}\n\nat {f'[{place}]({url})' if url else place}"


def _source_url(source: SourceLine, environ: Mapping[str, str]) -> str:
    """Return the address of the line in the commit that the job has checked out; "" if the job does not say."""
    place = f"{quote(source.file)}#L{source.line}"
    for repository, commit, folder in (
        (_github(environ), environ.get("GITHUB_SHA", ""), "blob"),
        (environ.get("CI_PROJECT_URL", ""), environ.get("CI_COMMIT_SHA", ""), "-/blob"),
    ):
        if repository and _SHA.fullmatch(commit):
            return f"{repository}/{folder}/{commit}/{place}"
    return ""


def _github(environ: Mapping[str, str]) -> str:
    server, repository = environ.get("GITHUB_SERVER_URL", ""), environ.get("GITHUB_REPOSITORY", "")
    return f"{server}/{repository}" if server and repository else ""


def _problems(report: RunReport) -> Iterator[str]:
    shown = report.problems[:_MOST_PROBLEMS]
    if len(report.problems) > 1:
        yield "\n".join(f"- {code(hide_credentials(str(problem)))}" for problem in shown)
    if more := len(report.problems) - len(shown):
        yield f"and {counted(more, 'more problem')}"


def _about(report: RunReport, environ: Mapping[str, str]) -> str:
    facts = [f"exit code {report.exit_code}"]
    links: list[str] = []
    notes: list[str] = []
    if (view := report.view) is not None:
        record = view.record
        facts = [f"run {code(view.run_id)}", *facts]
        facts += [counted(record.world_size, "rank")] if record.world_size else []
        facts += [duration(view.duration_s)]
        if record.git is not None:
            facts.append(f"commit {code(record.git.commit[:12])}{' with changes' if record.git.dirty else ''}")
        urls = dict.fromkeys(found["url"] for found in tracker_outputs(view.layout, record).values() if "url" in found)
        links += [link("W&B run" if number == 0 else f"W&B run {number + 1}", url) for number, url in enumerate(urls)]
        links.append(f"run directory {code(view.layout.where)}")
        if tags := view.annotations.tags:
            notes.append(f"tags {' '.join(code(tag) for tag in tags)}")
        if note := view.annotations.note:
            notes.append(f"note {code(note)}")
    run_on_github = environ.get("GITHUB_RUN_ID") and _github(environ)
    job = f"{run_on_github}/actions/runs/{environ['GITHUB_RUN_ID']}" if run_on_github else environ.get("CI_JOB_URL")
    if job:
        links.append(link("CI job", job))
    return "\n\n".join(" · ".join(part) for part in (facts, links, notes) if part)


# --- A retraining ---


def _model(report: RunReport) -> Iterator[str]:
    if (record := report.retraining) is None:
        return
    if record.scores:
        yield "### Comparison"
        yield _scores(record)
    if record.gate:
        yield table(("", "gate"), [["✅" if each.passed else "❌", cell(each.reason)] for each in record.gate])
    if record.difference:
        yield "Training data: " + ", ".join(code(text) for text in record.difference)


def _scores(record: RetrainRecord) -> str:
    candidate, champion = (record.scores.get(side, {}) for side in ("candidate", "champion"))
    names = list(dict.fromkeys((*candidate, *champion)))[:_MOST_METRICS]
    header = ["metric", _version("candidate", record.version)]
    if not champion:
        return table(header, [[cell(name), _number(candidate.get(name))] for name in names])
    rows = [
        [cell(name), _number(candidate.get(name)), _number(champion.get(name)), _change(candidate, champion, name)]
        for name in names
    ]
    return table([*header, _version("champion", record.champion), "change"], rows)


def _version(side: str, number: int | None) -> str:
    return side if number is None else f"{side} (version {number})"


def _change(candidate: Mapping[str, float], champion: Mapping[str, float], name: str) -> str:
    new, old = candidate.get(name, math.nan), champion.get(name, math.nan)
    if not math.isfinite(new - old):
        return "-"
    share = f" ({(new - old) / abs(old):+.1%})" if old else ""
    return f"{new - old:+.4g}{share}"


def _number(value: float | None) -> str:
    """Four significant digits; NaN and infinities by name, "-" for none."""
    return "-" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _stages(stages: Sequence[StageReport]) -> str:
    rows = [
        [
            _STAGE_SIGNS.get(stage.status, cell(stage.status)),
            stage.name,
            duration(stage.duration_s),
            cell(stage.detail) if stage.detail else "",
        ]
        for stage in stages
    ]
    return table(("", "stage", "time", ""), rows)


# --- A run ---


def _metrics(view: RunView) -> Iterator[str]:
    record = view.record
    plot, problem = _curves(view)
    sparks = {curve.name: sparkline(curve.main[1]) for panel in plot.panels for curve in panel.curves} if plot else {}
    if not (names := sorted({*record.last_metrics, *sparks})):
        return
    yield "### Metrics"
    rows = [[cell(name), _number(record.numbers.get(name)), sparks.get(name, "")] for name in names]
    yield table(("metric", "last", "curve"), rows[:_MOST_METRICS])
    if (more := len(rows) - _MOST_METRICS) > 0:
        yield f"and {counted(more, 'more metric')}"
    if (best := record.best) is not None:
        yield f"best {code(best.metric)} {_number(best.value)} at step {best.step}"
    if problem:
        yield problem


def _curves(view: RunView) -> tuple[Plot | None, str]:
    """Return the curves of the run; if they cannot be shown, None and the reason as Markdown."""
    try:
        if (size_bytes := view.layout.metrics_jsonl.stat().st_size) > _CURVES_BYTES:
            command = code(f"ddptrain results compare {run_argument(view.layout)}")
            return None, f"There are too many values for curves here ({size_bytes >> 20} MiB): {command} draws them"
        return whole_plot(view), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, DdptrainError) as error:
        return None, f"The curves cannot be shown: {code(str(error))}"


def _failure(report: RunReport) -> Iterator[str]:
    view, tails = report.view, report.tails
    failure = view.record.failure if view is not None else None
    if failure is not None and failure.traceback:
        text = clean(hide_credentials(failure.traceback))
        if len(text) > _TRACEBACK_CHARACTERS:
            text = f"{text[:1000]}\n...\n{text[1000 - _TRACEBACK_CHARACTERS :]}"
        yield details("Traceback" if failure.rank is None else f"Traceback of rank {failure.rank}", fenced(text))
    for rank, lines in tails.items():
        yield details(f"Last lines of rank {rank}", fenced("\n".join(lines)))
    others = [str(each.rank) for each in report.ranks if each.failed and each.rank not in tails]
    if others:
        more = f" and {counted(len(others) - _MOST_OTHERS, 'more rank')}" if len(others) > _MOST_OTHERS else ""
        yield f"Also failed: rank {', '.join(others[:_MOST_OTHERS])}{more}"


def sparkline(values: Sequence[float]) -> str:
    """Return the values as block characters, at most 24; "" for fewer than two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    width = min(_SPARK_WIDTH, len(finite))
    starts = [len(finite) * at // width for at in range(width + 1)]
    means = [fmean(finite[start:end]) for start, end in pairwise(starts)]
    low, high = min(means), max(means)
    if high == low or not math.isfinite(high - low):
        return _SPARKS[0] * width
    scale = (len(_SPARKS) - 1) / (high - low)
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def code(text: str) -> str:
    """Return one line as a code span: no link, no mention of a user, no HTML."""
    line = clean_line(shorten(text.strip(), _LONGEST_SPAN)) or "-"
    fence = _fence(line, 1)
    space = " " if "`" in (line[0], line[-1]) else ""
    return f"{fence}{space}{line}{space}{fence}"


def cell(text: str) -> str:
    """Return one line as a code span for a table."""
    return code(text).replace("|", "\\|")


def fenced(text: str, language: str = "text") -> str:
    """Return the text as a code block."""
    shown = clean(text.rstrip())
    fence = _fence(shown, 3)
    return f"{fence}{language}\n{shown}\n{fence}"


def link(label: str, url: str) -> str:
    """Return a link; other addresses than plain HTTP ones as code."""
    return f"[{label}]({url})" if _LINK.fullmatch(url) else code(url)


def is_plain_link(url: str) -> bool:
    """Return whether a text is an HTTP address that cannot be anything else."""
    return len(url) <= _LONGEST_LINK and _LINK.fullmatch(url) is not None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def details(summary: str, body: str) -> str:
    """Return a block that is folded; `summary` is text of our own."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _fence(text: str, least: int) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(least, longest + 1)
