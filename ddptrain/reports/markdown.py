"""A report as Markdown, for the summary of a CI step and for comments on pull requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

import numpy as np

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import DdptrainError
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.redact import hide_credentials
from ddptrain.reports.curves import Array, read_lines
from ddptrain.reports.facts import RunReport
from ddptrain.results.run import Run
from ddptrain.text_tables import clean, clean_line, duration

COMMENT_CHARACTERS = 65_536  # the longest comment that GitHub takes
_TRACEBACK_CHARACTERS = 8_000
_MOST_METRICS = 40
_MOST_PROBLEMS = 20
_MOST_OTHERS = 20
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
    more = f": see {code(view.where)}" if view is not None else ""
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
    view = report.view
    github = environ.get("GITHUB_SERVER_URL", "") + "/" + environ.get("GITHUB_REPOSITORY", "")
    version = f" version {report.version}" if report.version is not None else ""
    yield f"## {_SIGNS[report.level]} {code(report.model or report.name)}{version}: {report.status}"
    if report.cause:
        yield code(hide_credentials(report.cause))
    if report.cause and report.source is not None:
        place = code(str(report.source))
        commits = {f"{github}/blob": "GITHUB_SHA", f"{environ.get('CI_PROJECT_URL', '')}/-/blob": "CI_COMMIT_SHA"}
        found = ((folder, environ.get(name, "")) for folder, name in commits.items())
        checkout = next((f"{folder}/{commit}" for folder, commit in found if _SHA.fullmatch(commit)), "")
        url = f"{checkout}/{quote(report.source.file)}#L{report.source.line}"
        yield f"at [{place}]({url})" if checkout else f"at {place}"
    if len(report.problems) > 1:
        yield "\n".join(f"- {code(hide_credentials(str(problem)))}" for problem in report.problems[:_MOST_PROBLEMS])
    if (more := len(report.problems) - _MOST_PROBLEMS) > 0:
        yield f"and {counted(more, 'more problem')}"

    about = [f"run {code(view.run_id)}"] if view is not None else []
    about += [f"exit code {report.exit_code}"]
    links: list[str] = []
    notes: list[str] = []
    if view is not None:
        record, marks = view.record, view.annotations
        about += [counted(record.world_size, "rank")] if record.world_size else []
        about += [duration(view.duration_s)]
        if record.git is not None:
            about += [f"commit {code(record.git.commit[:12])}{' with changes' if record.git.dirty else ''}"]
        urls = dict.fromkeys(found["url"] for found in view.trackers().values() if "url" in found)
        links += [link("W&B run" if at == 1 else f"W&B run {at}", url) for at, url in enumerate(urls, start=1)]
        links += [f"run directory {code(view.where)}"]
        notes += [f"tags {' '.join(map(code, marks.tags))}"] if marks.tags else []
        notes += [f"note {code(marks.note)}"] if marks.note else []
    job = environ.get("GITHUB_RUN_ID")
    if job := f"{github}/actions/runs/{job}" if job else environ.get("CI_JOB_URL", ""):
        links += [link("CI job", job)]
    yield from (" · ".join(part) for part in (about, links, notes) if part)
    yield from _content(report)


def _content(report: RunReport) -> Iterator[str]:
    view, failure, retraining = report.view, report.failure, report.retraining
    if failure is not None and failure.traceback:
        text = clean(hide_credentials(failure.traceback))
        if len(text) > _TRACEBACK_CHARACTERS:
            text = f"{text[:1000]}\n...\n{text[1000 - _TRACEBACK_CHARACTERS :]}"
        yield details("Traceback" if failure.rank is None else f"Traceback of rank {failure.rank}", fenced(text))
    for rank, lines in report.tails.items():
        yield details(f"Last lines of rank {rank}", fenced("\n".join(lines)))
    if others := [str(each.rank) for each in report.ranks if each.failed and each.rank not in report.tails]:
        more = len(others) - _MOST_OTHERS
        rest = f" and {counted(more, 'more rank')}" if more > 0 else ""
        yield f"Also failed: rank {', '.join(others[:_MOST_OTHERS])}{rest}"

    if retraining is not None and retraining.scores:
        yield "### Comparison"
        yield _scores(retraining)
    if report.gate:
        yield table(("", "gate"), [["✅" if each.passed else "❌", cell(each.reason)] for each in report.gate])
    if retraining is not None and retraining.difference:
        yield "Training data: " + ", ".join(map(code, retraining.difference))
    if view is not None:
        yield from _metrics(view)
    if reached := [stage for stage in report.stages if stage.status != "skipped"]:
        yield "### Stages"
        signs = [_STAGE_SIGNS.get(stage.status) or cell(stage.status) for stage in reached]
        rows = [
            (sign, stage.name, duration(stage.duration_s), cell(stage.detail) if stage.detail else "")
            for sign, stage in zip(signs, reached, strict=True)
        ]
        yield table(("", "stage", "time", ""), rows)
    if view is not None:
        yield f"Look further with `ddptrain results show {view.argument}`"


def _scores(record: RetrainRecord) -> str:
    """Return the metrics of the new version, beside those of the champion if there is one."""
    candidate, champion = (record.scores.get(side, {}) for side in ("candidate", "champion"))
    numbers = {"candidate": record.version, "champion": record.champion}
    titles = [side if number is None else f"{side} (version {number})" for side, number in numbers.items()]
    rows = []
    for name in list(dict.fromkeys((*candidate, *champion)))[:_MOST_METRICS]:
        new, old = candidate.get(name, math.nan), champion.get(name, math.nan)
        share = f" ({(new - old) / abs(old):+.1%})" if old else ""
        change = f"{new - old:+.4g}{share}" if math.isfinite(new - old) else "-"
        rows.append((cell(name), _number(candidate.get(name)), _number(champion.get(name)), change))
    if not champion:
        return table(("metric", titles[0]), [row[:2] for row in rows])
    return table(("metric", *titles, "change"), rows)


def _number(value: float | None) -> str:
    """Four significant digits; NaN and infinities by name, "-" for none."""
    return "-" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _metrics(view: Run) -> Iterator[str]:
    record, sparks, problem = view.record, dict[str, str](), ""
    try:
        for line in read_lines(view):
            sparks.setdefault(line.metric, sparkline(line.value))  # the mean of the ranks comes first
    except DdptrainError as error:
        problem = f"The curves cannot be shown: {code(str(error))}"
    if not (names := sorted({*record.last_metrics, *sparks})):
        return
    yield "### Metrics"
    rows = [(cell(name), _number(record.numbers.get(name)), sparks.get(name, "")) for name in names]
    yield table(("metric", "last", "curve"), rows[:_MOST_METRICS])
    if (more := len(rows) - _MOST_METRICS) > 0:
        yield f"and {counted(more, 'more metric')}"
    if (best := record.best) is not None:
        yield f"best {code(best.metric)} {_number(best.value)} at step {best.step}"
    if problem:
        yield problem


def sparkline(values: Array) -> str:
    """Return the values as block characters, at most 24; "" for fewer than two finite values."""
    finite = values[np.isfinite(values)]
    if len(finite) < 2:
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(_SPARK_WIDTH, len(finite)))])
    low, high = means.min(), means.max()
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round(place)] for place in (means - low) * scale)


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
