"""The YAML reader: values with the place of their keys, and the limits."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.config.yaml_reader import MAX_NODES, Node, Place, make_nodes, parse_yaml, plain, scalar
from ddptrain.errors import ConfigError


def at(line: int, column: int) -> Place:
    return Place(0, line, column, f"c:{line}:{column}")


def parse(text: str) -> tuple[Any, list[str]]:
    root, problems = parse_yaml(text, at)
    return (plain(root) if root is not None else None), [str(each.problem) for each in problems]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, at)
    return str(error.value)


def test_value_in_a_mapping_has_the_place_of_its_key_and_one_in_a_list_its_own() -> None:
    root, problems = parse_yaml("a:\n  b: [1,\n   x]\n", at)
    assert root is not None and problems == []
    items = root.value["a"].value["b"]
    assert (root.value["a"].place, items.place) == (at(1, 1), at(2, 3))
    assert [item.place for item in items.value] == [at(2, 7), at(3, 4)]
    assert (root.size, root.height) == (5, 4)


def test_alias_is_the_same_value_counted_in_full() -> None:
    root, _ = parse_yaml("a: &x [1, 2]\nb: *x\n", at)
    assert root is not None and plain(root) == {"a": [1, 2], "b": [1, 2]}
    assert (root.value["b"].place, root.size) == (at(2, 1), 7)


def test_anchor_may_be_defined_again() -> None:
    assert parse("[&x 1, *x, &x 2, *x]") == ([1, 1, 2, 2], [])


def test_all_problems_are_found_and_their_values_dropped_or_replaced() -> None:
    text = "a: 1\na: 2\n3: x\n<<: {b: 1}\nc: !t 5\n[d]: 1e999\n"
    assert parse(text) == (
        {"a": 1, "c": "5"},
        [
            "c:2:1: a: is given twice: on line 1 and on line 2 (keep one of them)",
            "c:3:1: a key must be text, not 3 (write it in quotes)",
            "c:4:1: merge keys (<<) are not supported (write the keys out)",
            "c:5:4: c: the tag !t is not supported (delete it; quotes make a value text)",
            "c:6:1: a key must be text, not a list or mapping (write it in quotes)",
            "c:6:6: 1e999 is too large for a number (write it in quotes if it is text)",
        ],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [*b]", "c:1:5: a[0]: *b is not defined above (quote text that starts with *)"),
        ("a: &b\n  c: *b\n", "c:2:6: a.c: *b holds itself (quote text that starts with *)"),
        ("a: 1\n---\nb: 2\n", "c:2:1: a second document starts here (keep one, and delete the --- line)"),
        ("a:\n\t- b\n", "c:2:1: a tab is used for indentation: YAML allows only spaces (replace the tab with spaces)"),
        ("[" * 51 + "]" * 51, "c:1:51: values are nested more than 50 deep (make it flatter)"),
    ],
)
def test_what_ends_the_reading_names_its_place(text: str, message: str) -> None:
    assert refused(text) == message


def test_depth_limit_is_exact() -> None:
    value, problems = parse("[" * 50 + "]" * 50)
    assert problems == [] and value != []
    chain = "\n".join(["- &a0 [x]", *(f"- &a{n + 1} [*a{n}]" for n in range(60))])
    assert "nested more than 50 deep (use fewer aliases)" in refused(chain)


def test_values_of_aliases_are_limited() -> None:
    many = f"- &a [{'x,' * 999}]\n" + "- *a\n" * (MAX_NODES // 1000)
    assert "more than 100,000 values, aliases counted in full (use fewer)" in refused(many)
    fewer = f"- &a [{'x,' * 999}]\n" + "- *a\n" * (MAX_NODES // 1000 - 2)
    assert parse(fewer)[1] == []


def test_empty_text_has_no_root() -> None:
    assert parse("") == (None, []) and parse("# only a comment\n") == (None, [])


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000.0), ("0x1f", 31), ("no", "no"), ("~", None), ("-.inf", float("-inf"))]
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value


def test_plain_data_become_nodes_and_back() -> None:
    node = make_nodes(at(1, 1), {"a": (1, {"b": None})})
    assert plain(node) == {"a": [1, {"b": None}]}
    assert isinstance(node.value["a"].value[1], Node)
