"""Frames of a terminal as an SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tests.docs.terminal_svg import Frame, Span, animated_svg, shortened

ONE = (Span(0, "$ train <a>"),)
TWO = (Span(0, "rank 1", "red", bold=True), Span(8, "failed"))


def test_equal_frames_are_left_out_and_pauses_are_shortened() -> None:
    frames = [Frame(10.0, (ONE,)), Frame(10.5, (ONE,)), Frame(11.0, (TWO,)), Frame(60.0, (ONE, TWO))]
    assert shortened(frames, 2.0) == [Frame(0.0, (ONE,)), Frame(1.0, (TWO,)), Frame(3.0, (ONE, TWO))]


def test_svg_is_well_formed_has_each_row_once_and_moves_in_steps() -> None:
    text = animated_svg([Frame(0.0, (ONE,)), Frame(3.0, (ONE, (), TWO))], 20, "a <title>")
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert [element.get("id") for element in root.find(f"{name}defs") or ()] == ["r0", "r1"]
    assert [each.get("href") for each in root.iter(f"{name}use")] == ["#r0", "#r0", "#r1"]
    assert [each.get("y") for each in root.iter(f"{name}use")] == ["0", "54", "90"]
    assert [each.text for each in root.iter(f"{name}text")] == ["$ train <a>", "rank 1", "failed"]
    assert "37.500%{transform:translateY(-54px)}" in text
    assert "prefers-reduced-motion" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # loads nothing
