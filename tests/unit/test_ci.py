"""What the log of a CI job receives: commands of ours, exactly as the services parse them, and none of others."""

from __future__ import annotations

import json

import pytest

from ddptrain import ci
from ddptrain.ci import CiService
from ddptrain.errors import UsageError
from tests.support import fake_time

GITHUB = {"GITHUB_ACTIONS": "true"}


@pytest.mark.parametrize(
    ("environ", "service"),
    [
        ({}, ""),
        ({"CI": "true"}, ""),
        (GITHUB, "github"),
        ({"GITHUB_ACTIONS": "false"}, ""),
        ({"GITLAB_CI": "true"}, "gitlab"),
        (GITHUB | {"DDPTRAIN_CI": "off"}, ""),
        (GITHUB | {"DDPTRAIN_CI": " OFF "}, ""),
        (GITHUB | {"DDPTRAIN_CI": ""}, "github"),
        ({"GITLAB_CI": "true", "DDPTRAIN_CI": "auto"}, "gitlab"),
    ],
)
def test_service_is_detected_from_the_environment(environ: dict[str, str], service: str) -> None:
    assert ci.ci_service(environ) == service


def test_unknown_value_of_the_switch_is_refused() -> None:
    with pytest.raises(UsageError, match=r'^DDPTRAIN_CI is "none": set it to off or auto, or unset it$'):
        ci.ci_service({"DDPTRAIN_CI": "none"})


def test_annotation_escapes_what_ends_a_property_or_a_line() -> None:
    assert (
        ci.annotation("error", "50%: a,\r\nb::c", title="x: y, z%", file="a,b:c.py", line=12)
        == "::error file=a%2Cb%3Ac.py,line=12,title=x%3A y%2C z%25::50%25: a,%0D%0Ab::c"
    )


def test_annotation_without_a_place_has_no_properties() -> None:
    assert ci.annotation("warning", "late", line=3) == "::warning::late"


def test_annotation_holds_no_control_characters() -> None:
    assert ci.annotation("error", "a\x1b[31mb\x00\u202ec") == "::error::abc"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("::error::x\n", ": :error::x\n"),
        ("a\n  \t::set-output name=a::b\n", "a\n  \t: :set-output name=a::b\n"),
        ("a\r::stop-commands::t\n", "a\r: :stop-commands::t\n"),  # the runner takes a lone CR for the end of a line
        ("\u00a0\u2003::error::x", "\u00a0\u2003: :error::x"),  # it skips these, too
        ("[rank 0] ##[error]x", "[rank 0] ## [error]x"),  # of the older form, anywhere in a line
        ("###[error]x", "### [error]x"),
        ("std::vector a::b ## [x] #[y]", "std::vector a::b ## [x] #[y]"),
        (":::error::x", ": ::error::x"),
    ],
)
def test_guard_breaks_commands_and_nothing_else(text: str, safe: str) -> None:
    assert ci.guard(GITHUB)(text) == safe
    assert ci.guard(GITHUB | {"DDPTRAIN_CI": "off"})(text) == safe  # the runner executes them all the same
    assert ci.guard({})(text) == text


def test_json_stays_the_same_data_without_commands() -> None:
    data = {"line": '##[error]x "##[" \\##['}
    safe = ci.json_guard(GITHUB)(json.dumps(data))
    assert "##[" not in safe
    assert json.loads(safe) == data
    assert ci.json_guard({})("##[") == "##["


def test_sections_have_the_form_of_each_service(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_time.replace(monkeypatch, "time", lambda: 1560896352.4)
    assert ci.fold_start(CiService.GITHUB, "50% of\nit", "a_1") == "::group::50%25 of it\n"
    assert ci.fold_end(CiService.GITHUB, "a_1") == "::endgroup::\n"
    start = "\x1b[0Ksection_start:1560896352:a_1[collapsed=true]\r\x1b[0Klogs of it\n"
    assert ci.fold_start(CiService.GITLAB, "logs of\r\nit", "a_1") == start
    assert ci.fold_end(CiService.GITLAB, "a_1") == "\x1b[0Ksection_end:1560896352:a_1\r\x1b[0K\n"
    assert ci.fold_start(CiService.NONE, "a", "b") == ci.fold_end(CiService.NONE, "b") == ""
