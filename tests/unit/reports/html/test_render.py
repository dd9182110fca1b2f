"""Nothing from a run directory becomes markup, and the script's data cannot leave their element."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup
from pydantic import TypeAdapter

from ddptrain.reports.html.page_content import Subjects, SweepTable, html_page
from ddptrain.reports.html.render import long_text, page_json, safe_text
from ddptrain.results.lookup import load_run
from ddptrain.results.run_record import GitRecord
from ddptrain.results.sweep_record import SweepRecord
from tests.support.hostile_run import ATTACKS, MARK, write_hostile_run
from tests.unit.reports.runs import failed_run, run


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the content of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.lasttag in self.contents and data.strip():
            self.contents[self.lasttag].append(data)


def test_text_loses_control_and_bidi_characters_and_its_end() -> None:
    assert safe_text("a\u202eb\x00c\x1b[31m") == "a\ufffdb\ufffdc\ufffd[31m"
    assert safe_text("x" * 5000) == "x" * 1000 + "..."
    assert (safe_text(None), safe_text(3), safe_text(Markup("<b>"))) == ("", 3, "<b>")
    assert long_text("<&>" + "x" * 2000) == "&lt;&amp;&gt;" + "x" * 2000


def test_json_cannot_end_its_element() -> None:
    text = page_json({"</script>": ["<!--", "a & b", "\u202e\u2028", 1.5, None]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"</script>": ["<!--", "a & b", "\ufffd\ufffd", 1.5, None]}


def test_policy_permits_only_the_script_and_the_style_of_the_page(tmp_path: Path) -> None:
    page = Elements(html_page(Subjects([failed_run(tmp_path)])).decode())
    (policy,) = [values["content"] for tag, values in page.found if tag == "meta" and "http-equiv" in values]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    _, script = page.contents["script"]
    (style,) = page.contents["style"]
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "http" not in policy


def test_failed_run_shows_its_failure(tmp_path: Path) -> None:
    page = html_page(Subjects([failed_run(tmp_path)])).decode()
    assert "ValueError: wrong shape" in page
    assert f"<code>{tmp_path}/train.py:4</code> in step" in page


def table_of(content: dict[str, object]) -> SweepTable:
    about = {"format": 1, "sweep_id": "s", "name": "s", "source": "", "started_at": "", "metric": "loss"}
    return SweepTable.of(TypeAdapter(SweepRecord).validate_python({**about, **content}))


@pytest.mark.parametrize(("spread", "error", "columns"), [(None, "", []), (0.5, "boom", ["Spread", "Error"])])
def test_table_of_trials_has_no_empty_columns(spread: float | None, error: str, columns: list[str]) -> None:
    trial = {"number": 0, "params": {}, "state": "complete", "value": 1.0, "spread": spread, "error": error}
    page = html_page(Subjects([], table_of({"trials": [trial]}))).decode()
    (table,) = re.findall(r'aria-label="Trials"><table.*?</table>', page, re.DOTALL)
    titles = re.findall(r"<th scope=.col.[^>]*>([^<]*)</th>", table)
    assert [title for title in titles if title in ("Spread", "Error")] == columns
    assert len(titles) == len(re.findall(r"<td|<th scope=.row", table))


def test_values_of_lists_are_places_on_their_axis() -> None:
    values = [1e-05, 0.00010000001, 100_000_001, None, [1, 2]]
    trials = [{"number": at, "state": "complete", "params": {"params.a": value}} for at, value in enumerate(values)]
    space = {"params.a": {"kind": "choice", "values": values}, "params.b": {"kind": "log_int", "low": 1, "high": 9}}
    page = html_page(Subjects([], table_of({"trials": trials, "space": space}))).decode()
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    sweep = json.loads(data)["sweep"]
    assert sweep["axes"][0]["values"] == ["1e-05", "0.00010000001", "100000001", "null", "[1, 2]"]
    assert [trial["params"][0] for trial in sweep["trials"]] == sweep["axes"][0]["values"]
    assert sweep["axes"][1]["scale"] == "log"
    assert "null" in re.findall(r'<td class="number" data-value="[^"]*">([^<]*)</td>', page)


def test_setting_that_only_one_run_has_is_a_difference(tmp_path: Path) -> None:
    views = []
    for name, text in (("a", ""), ("b", "  lr: 0.1\n")):
        view = run(tmp_path / name)
        (view.layout.root / "config.yaml").write_text(f"workload: mine:train\nparams:\n  epochs: 1\n{text}")
        views.append(view)
    page = html_page(Subjects(views)).decode()
    (table,) = re.findall(r'<section id="runs".*?</section>', page, re.DOTALL)
    assert "lr" in re.findall(r"<th scope=.col.[^>]*>([^<]*)</th>", table) and "epochs" not in table


def test_tags_note_and_time_are_shown(tmp_path: Path) -> None:
    view = run(tmp_path)
    (view.layout.root / "annotations.json").write_text('{"tags": ["good"], "note": "<b>best</b> so far"}')
    page = html_page(Subjects([view])).decode()
    assert '<span class="tag">good</span>' in page
    assert "&lt;b&gt;best&lt;/b&gt; so far" in page
    assert "Where the time went" in page and "4.2 s" in page


def test_page_loads_nothing_and_has_no_inline_handlers(tmp_path: Path) -> None:
    view = run(tmp_path, curves={"val/loss": [3.0, 2.0]})
    for tag, values in Elements(html_page(Subjects([view])).decode()).found:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        assert not any(name.startswith("on") or name in {"style", "srcset"} for name in values)
        assert not any("//" in (values.get(name) or "") for name in ("src", "href"))


def test_hostile_run_is_inert_and_bounded(tmp_path: Path) -> None:
    folder = write_hostile_run(tmp_path / "run")
    text = html_page(Subjects([load_run(folder)])).decode()
    assert len(text) < 3_000_000
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00\x1b]", text)
    page = Elements(text)
    assert [tag for tag, _ in page.found].count("script") == 2
    for tag, values in page.found:
        assert tag in _TAGS
        assert not any(name.startswith("on") for name in values)
        assert (values.get("href") or "#").startswith("#")
    assert "root:x:0" not in text
    assert f"&lt;/script&gt;&lt;script&gt;document.title=&#39;{MARK}&#39;" in text  # it is shown as text
    assert ATTACKS[0] not in text


_TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body a header h1 h2 h3 p nav ul ol li main section div dl dt dd span i form label "
        "select input output button fieldset legend noscript figure figcaption details summary table caption colgroup "
        "col thead tbody tr th td svg rect pre code footer script img",
    )
)


def test_run_shows_its_changes_and_generated_names(tmp_path: Path) -> None:
    view = run(tmp_path, git=GitRecord(commit="abc", dirty=True))
    view.layout.git_diff.write_text(f"+rate = 2 # {'x' * 100_000} <script>\n")
    for path, text in {
        "tables/generated_names/step-5-rank-0.csv": "name,is_known\nRex<i>,True\n",
    }.items():
        (view.layout.artifacts_dir / path).parent.mkdir(parents=True)
        (view.layout.artifacts_dir / path).write_text(text)
    page = html_page(Subjects([view])).decode()
    assert "xxx &lt;script&gt;</pre>" in page.replace("\n</pre>", "</pre>") and "Changes that are not committed" in page
    assert "Rex&lt;i&gt; (known)</span>" in page and "(known): the name is in its training data" in page
    (view.layout.artifacts_dir / "tables/generated_names/step-5-rank-0.csv").write_text("name,is_known\nMo,False\n")
    assert "(known)" not in html_page(Subjects([view])).decode()
    assert '<a href="#names">' in page and 'id="names"' in page


def test_changes_of_an_earlier_part_of_a_run_are_not_shown(tmp_path: Path) -> None:
    view = run(tmp_path, git=GitRecord(commit="abc", dirty=False))
    view.layout.git_diff.write_text("+rate = 2\n")
    assert "rate = 2" not in html_page(Subjects([view])).decode()
