"""Output of ranks in the log of a CI job: much of it is folded, messages of ddptrain never are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ddptrain.ci import CiService
from ddptrain.driver.display import open_display, output_api
from ddptrain.driver.display.log_tail import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.plain import FoldingRenderer, PlainRenderer

START, END = "::group::more output of the ranks", "::endgroup::"


class Folded:
    """A renderer for GitHub, and the lines that it has written."""

    def __init__(self, service: CiService = CiService.GITHUB) -> None:
        self.file = io.StringIO()
        stream = Stream(self.file)
        self.renderer = FoldingRenderer(PlainRenderer(stream, Stream(io.StringIO()), False), stream, service)

    def print(self, count: int, rank: int = 0) -> None:
        self.renderer.log([rank], [RankLine(str(number)) for number in range(count)])

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_short_output_is_not_folded() -> None:
    folded = Folded()
    folded.print(30)
    folded.renderer.handle(output_api.Closing(("done",), {}))
    assert folded.lines == [*(f"[rank 0] {number}" for number in range(30)), "done"]


def test_long_output_is_folded_until_a_message_of_ddptrain() -> None:
    folded = Folded()
    folded.print(30 - 1)
    folded.print(3, rank=1)
    folded.renderer.handle(output_api.DriverStatus("waiting"))
    folded.renderer.handle(output_api.RedrawnLine(1, "50 %"))
    folded.renderer.handle(output_api.DriverNotice("rank 1 failed", "error"))
    folded.print(1)
    folded.renderer.handle(output_api.Closing(("failed",), {}))
    shown = ["[rank 1] 0", START, "[rank 1] 1", "[rank 1] 2", "[rank 1] 50 %", END, "[rank 0] 0", "failed"]
    assert folded.lines[30 - 1 :] == shown


def test_each_section_of_gitlab_has_its_own_name() -> None:
    folded = Folded(CiService.GITLAB)
    for _ in range(2):
        folded.print(30 + 1)
        folded.renderer.handle(output_api.WorldSize(1))
    names = [line.split(":")[2].partition("[")[0] for line in folded.file.getvalue().split("\n") if "section_" in line]
    starts, ends = names[::2], [name.partition("\r")[0] for name in names[1::2]]
    assert starts == ends
    assert len(set(starts)) == 2


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_ranks_cannot_give_commands(tmp_path: Path, mode: str) -> None:
    text = "::error::a ##[error]b\rc::error::\r::stop-commands::x"
    (tmp_path / "rank-0.log").write_text(f"{text}\n{text}")
    out, err = io.StringIO(), io.StringIO()
    with open_display(mode, tmp_path, "run", out, err, {"GITHUB_ACTIONS": "true"}) as display:
        display.expect(1)
        display.notice("a\n::error::name\r::error::b ##[error]c")
        display.close({0: 2 * len(text) + 1}, ["##[error]", "last\n::error::x"], {"event": "end", "x": "##[error]"})
    for line in (out.getvalue() + err.getvalue()).replace("\r", "\n").splitlines():
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
    if mode == "json":
        assert [json.loads(line) for line in out.getvalue().splitlines()][-1] == {"event": "end", "x": "##[error]"}


def test_json_and_other_places_have_no_sections(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("a\n" * 2 * 30)
    for mode, environ in (("json", {"GITHUB_ACTIONS": "true"}), ("plain", {})):
        out = io.StringIO()
        display = open_display(mode, tmp_path, "run", out, io.StringIO(), environ)
        display.expect(1)
        display.close()
        assert len(out.getvalue().splitlines()) == 2 * 30
        assert "::group::" not in out.getvalue()


def test_as_many_lines_are_shown_after_a_message_as_before() -> None:
    folded = Folded()
    for _ in range(2):
        folded.print(30)
        folded.renderer.handle(output_api.DriverNotice("a message", "info"))
    assert START not in folded.lines and len(folded.lines) >= 2 * 30
    folded.print(30 + 1)
    assert folded.lines[-2] == START
