from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.errors import UsageError
from ddptrain.results.select.expression import Field, parse_expression, parse_fields

VALUES: dict[str, Any] = {
    "val/loss": 2.0,
    "best(val/loss)": 1.5,
    "nan": math.nan,
    "params.layers": 1,
    "params.unique": True,
    "params.sizes": [1, 2],
    "status": "failed",
    "started": "2026-01-02T00:00:00Z",
    "duration": 7200,
    "tags": ["good", "v2"],
    "zero": 0,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("val/loss<2.3 and params.layers==1", True),
        ("val/loss < 2.3 and params.layers == 2", False),
        ("val/loss > 3 or params.layers == 1", True),
        ("val/loss > 3 or params.layers == 1 and status == 'x'", False),  # and binds closer than or
        ("(val/loss < 3 or params.layers == 7) and status == 'failed'", True),
        ("not val/loss > 3", True),
        ("not not val/loss > 3", False),
        ("not status == 'failed' or true", True),  # not binds closer than or
        ("1 < val/loss <= 2", True),
        ("2 < val/loss <= 3", False),
        ("val/loss >= 2e0", True),
        ("val/loss == 2", True),
        ("val/loss != 2", False),
        ("val/loss > -1.5", True),
        ("best(val/loss) < 1.6 and last(val/loss) == 2", True),
        ("best('val/loss') == 1.5", True),
        ("'good' in tags", True),
        ("'bad' in tags", False),
        ("'bad' not in tags", True),
        ("status in ['failed', \"preempted\"]", True),
        ("status not in ['failed']", False),
        ("'ail' in status", True),
        ("params.layers in [1, 2,]", True),
        ("params.layers in []", False),
        ("params.sizes == [1, 2]", True),
        ("params.unique == true", True),
        ("params.unique == 1", False),  # Python's true is 1
        ("params.layers == true", False),
        ("duration > 1h and duration < 121m and duration <= 7200s and duration < 1d", True),
        ("started > '2026-01-01'", True),
        ("missing < 1", False),
        ("missing != 1", False),
        ("missing == missing", False),
        ("'a' not in missing", False),
        ("not missing < 1", True),
        ("nan < 1 or nan >= 1 or nan != nan", False),
        ("status < 3", False),
        ("status != 3", True),
        ("tags", True),
        ("zero or missing or nan", False),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert (
        parse_expression(text).matches(lambda field: VALUES.get(str(field).replace("last(val/loss)", "val/loss")))
        is expected
    )


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("", 1, "expected a value, found the end"),
        ("val/loss <", 11, 'expected a value after "<", found the end'),
        ("val/loss = 3", 10, 'write "==" to compare'),
        ("a && b", 3, 'write "and"'),
        ("a | b", 3, 'write "or"'),
        ("a == 'b", 6, "has no end"),
        ("(a or b", 8, 'expected ")", which closes what begins at character 1'),
        ("a b", 3, 'expected "and", "or" or the end, found "b"'),
        ("a < 1)", 6, 'found ")"'),
        ("started > 2026-01-01", 11, '"2026-01-01" is neither a number nor a name'),
        ("best(3) < 1", 6, "expected the name of a metric, as best(val/loss)"),
        ("not", 4, "found the end"),
        ("a in [1, 2", 11, 'expected "]"'),
        ("__import__('os').system('x')", 17, '".system" is neither a number nor a name'),
        ("__import__('os')", 11, 'expected "and", "or" or the end, found "("'),
        ("(" * 60 + "a" + ")" * 60, 52, "levels of nesting"),
        ("not " * 60 + "a", 205, "levels of nesting"),
    ],
)
def test_errors_tell_the_position(text: str, at: int, what: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_expression(text)
    assert f"at character {at}: " in str(raised.value) and what in str(raised.value)


def test_a_very_long_expression_is_refused() -> None:
    with pytest.raises(UsageError, match="4,003 characters; at most 4,000 are allowed"):
        parse_expression("a" * 4003)


@given(st.text(alphabet="ab1.<>=!()[], '\"notrdi/&|-\\\n", max_size=60))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_expression(text).matches(lambda field: 1.0) in (True, False)


def test_fields_are_those_named() -> None:
    assert parse_expression("val/loss < 1 and best(a) > 2 and val/loss > 0").fields == (
        Field("val/loss"),
        Field("a", "best"),
    )
    assert parse_fields("name, best(val/loss),params.x-y") == [
        Field("name"),
        Field("val/loss", "best"),
        Field("params.x-y"),
    ]
    with pytest.raises(UsageError, match="at character 6: expected a field"):
        parse_fields("name,")


@pytest.mark.parametrize(("opening", "closing"), [("(", ")"), ("[", "]"), ("not ", "")])
def test_fifty_levels_of_nesting_are_the_most_wherever_they_begin(opening: str, closing: str) -> None:
    flat = f"{opening}a{closing} and " * 60
    parse_expression(flat + opening * 50 + "a" + closing * 50)
    with pytest.raises(UsageError, match="more than 50 levels of nesting"):
        parse_expression(flat + opening * 51 + "a" + closing * 51)


def test_expression_of_4000_characters_is_read() -> None:
    assert parse_expression("a" * 4000).fields == (Field("a" * 4000),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7.0),
        ("+7.5", 7.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("2s", 2.0),
        ("2m", 120.0),
        ("2h", 7200.0),
        ("2d", 172_800.0),
    ],
)
def test_numbers_have_units_of_time(text: str, value: float) -> None:
    assert parse_expression(f"x == {text}").matches(lambda field: value)
    assert not parse_expression(f"x == {text}").matches(lambda field: value + 1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a < " + "x" * 50 + ")",
            'cannot read "a < ' + "x" * 50 + ')": at character 55: expected "and", "or" or the end',
        ),
        ("a b", 'cannot read "a b": at character 3: expected "and", "or" or the end, found "b"'),
        ("a $", 'cannot read "a $": at character 3: unexpected "$"; write names of that kind as last(\'...\'), and '),
        ("! a", 'cannot read "! a": at character 1: unexpected "!"; write "not" or "!="'),
        ("last(a", 'cannot read "last(a": at character 7: expected ")", which closes what begins at character 1, '),
        ("a in [1, ,]", 'cannot read "a in [1, ,]": at character 10: expected a value, found ","'),
    ],
)
def test_message_has_the_text_the_position_and_what_was_found(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_expression(text)
    assert str(raised.value).startswith(message)


def test_lists_of_other_lengths_differ() -> None:
    def holds(text: str, value: Any) -> bool:
        return parse_expression(text).matches(lambda field: value)

    assert not holds("x == [1]", [1, 2]) and holds("x != [1]", [1, 2]) and holds("x == [1, 2]", (1, 2))
    assert not holds("x == [true]", [1]) and holds("1 in x", [2, 1]) and not holds("true in x", [2, 1])
    assert not holds("1 in x", 5) and holds("1 not in x", 5) and not holds("1 in x", "1")
    assert not holds("x < true", 0) and not holds("x < 'b'", 0) and holds("x < 'b'", "a")
