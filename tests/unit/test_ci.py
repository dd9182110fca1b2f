"""The CI service, and annotations exactly as GitHub parses them."""

from __future__ import annotations

import pytest

from ddptrain import ci
from ddptrain.errors import UsageError

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
