"""Turns facts into the text of the page. Nothing from a run directory reaches the page but through `safe_text`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddptrain.file_ops import sha256
from ddptrain.redact import hide_credentials
from ddptrain.reports.markdown import is_plain_link
from ddptrain.results.lookup import RunView, time_text
from ddptrain.results.run_record import EnvironmentValue, RunStatus, root_cause
from ddptrain.results.tracker_records import tracker_outputs
from ddptrain.text_tables import clean, duration, number

_HERE = Path(__file__).parent
_SCRIPTS = ("chart.js", "curves.js", "sweep.js", "page.js")
_STATES = frozenset((*RunStatus, "complete", "pruned", "interrupted"))
_MOST_CHARACTERS = 1000  # of one text; long_text() permits more
_MOST_OF_LONG = 40_000  # the last lines of a rank, a traceback
_MOST_ROWS = 100  # of versions and variables
_FOR_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def safe_text(value: object) -> object:
    """Return what a template prints: a text without control and bidi characters, and of limited length.

    Autoescape follows. Markup is that of a template.
    """
    if value is None:
        return ""
    return value if isinstance(value, Markup | int | float) else _cleaned(str(value), _MOST_CHARACTERS)


def long_text(value: str, most: int = _MOST_OF_LONG) -> Markup:
    """Return the HTML of a long text, such as a traceback, at most `most` characters of it."""
    return escape(_cleaned(value, most))


def _cleaned(text: str, most: int) -> str:
    return clean(text if len(text) <= most else f"{text[:most]}...")


def page_json(value: object) -> Markup:
    """Return JSON for a script element: it cannot end the element, and its texts are safe as in `safe_text`."""
    text = json.dumps(_safe_data(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_FOR_SCRIPT))  # valid inside JSON strings, the only place where these occur


def _safe_data(value: object) -> object:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else clean(value)
    if isinstance(value, Mapping):
        return {str(key): _safe_data(item) for key, item in value.items()}
    return [_safe_data(item) for item in value] if isinstance(value, list | tuple) else value


def render_page(page: object, data: Mapping[str, object]) -> bytes:
    """Return the page as UTF-8; `data` is for its script.

    Its policy permits the script and the style of this package, by their hashes, and pictures inside the page.
    """
    script = "(() => {\n'use strict';\n" + "\n".join(_static(name) for name in _SCRIPTS) + "})();\n"
    style = _static("report.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = _environment().get_template("page.html.j2")
    values = {"policy": Markup(policy), "script": Markup(script), "style": Markup(style), "data": page_json(data)}
    return template.render(page=page, **values).encode("utf-8", "replace")


def _static(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=safe_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "data_url": Markup,  # made by PictureReader: base64 alone; too long for safe_text
        "duration": duration,
        "environment_rows": lambda view: list(_environment_rows(view)),
        "first": lambda text, count: text[:count],
        "links": _links,
        "long": long_text,
        "number": number,
        "param_name": lambda name: name.removeprefix("params."),
        "root_cause": root_cause,
        "settings_rows": lambda settings: [(setting.key, setting.value) for setting in settings],
        "short_number": _short_number,
        "sort_key": lambda value: "" if value is None or value != value else value,  # rows without a value stay last
        "sorted_items": lambda items: sorted(items.items())[:_MOST_ROWS],
        "status_class": lambda status: status if status in _STATES else "",
        "time": time_text,
        "variables": _variables,
    }
    return environment


def _short_number(value: object) -> str:
    """Return numbers with four digits; other texts as they are."""
    try:
        return f"{float(str(value)):.4g}" if value is not None else ""
    except ValueError:
        return str(value)


def _variables(variables: Mapping[str, EnvironmentValue]) -> list[tuple[str, str]]:
    items = sorted(variables.items())[:_MOST_ROWS]
    return [(name[:200], f"{hide_credentials(item.value[:500])} ({item.source[:20]})") for name, item in items]


def _links(view: RunView) -> list[tuple[str, str]]:
    """Return the addresses of trackers that are plain HTTP addresses."""
    found = [(name, one.get("url", "")) for name, one in tracker_outputs(view.layout, view.record).items()]
    return [(name[:50], url) for name, url in dict.fromkeys(found) if is_plain_link(url)][:10]


def _environment_rows(view: RunView) -> Iterator[tuple[str, str]]:
    record = view.record
    yield "directory", view.layout.where
    if record.driver.host:
        yield "driver", record.driver.description
    hosts = sorted({rank.host for attempt in record.attempts for rank in attempt.ranks if rank.host})
    if hosts:
        yield "hosts of the ranks", ", ".join(hosts[:50])
    if record.git is not None:
        yield "git commit", record.git.commit + (", with changes that are not committed" if record.git.dirty else "")
    if record.code is not None:
        yield "uploaded code", f"{record.code.folder}, {record.code.files} files, hash {record.code.hash}"
    if record.checkpoints:
        yield "checkpoints", ", ".join(record.checkpoints[:50])
