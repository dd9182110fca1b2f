"""Files that are no configuration: each ends in a clear error, none in a crash, a hang or a full memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.config.load import load_config, load_mapping
from ddptrain.config.resolved import resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.types import NAME_PATTERN
from ddptrain.errors import ConfigError

Refuse = Callable[[str | bytes], str]
EXAMPLES = settings(max_examples=200)
KNOWN_KEYS = {field.alias or name for name, field in RunConfig.model_fields.items()}


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    def call(text: str | bytes) -> str:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return refusal(path).replace(f"{tmp_path}/", "")

    return call


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "c.yaml: is empty (a configuration has"),
        ("  \n\n", "c.yaml: is empty"),
        ("# nothing\n", "c.yaml: contains only comments"),
        ("---\n# nothing\n...\n", "c.yaml: contains only comments"),
        ("- a\n", "c.yaml:1: expected a mapping, as workload: petnames, got a list"),
        ("\nhello\n", 'c.yaml:2: expected a mapping, as workload: petnames, got the text "hello"'),
        ("name: x\nparams:\n\tepochs: 3\n", "c.yaml:3: a tab is used for indentation: YAML allows only spaces"),
        ("a: 1\nb: x: y\n", "c.yaml:2: not valid YAML: mapping values are not allowed"),
        ('a: "x\n', "not valid YAML: found unexpected end of stream"),
        ("a: 1\n b: 2\n", "c.yaml:2: not valid YAML"),
        ("workload: m:f\n---\nb: 1\n", "c.yaml:2: a second document starts here"),
        ("workload: m:f\n? {a: 1}\n: 2\n", "c.yaml:2: a key must be text, not a list or mapping"),
        (
            "workload: m:f\nparams: {3: 1}\n",
            "c.yaml:2: params: a key must be text, not 3 (write it in quotes)",
        ),
        ("workload: m:f\nnull: 1\n", "c.yaml:2: a key must be text, not null"),
        (
            "workload: m:f\nx: &x {}\n<<: *x\n",
            "c.yaml:3: merge keys (<<) are not supported (write the keys out)",
        ),
        ("workload: m:f\nname: a\nname: b\n", "c.yaml:3: name: is given twice: on line 2 and on line 3"),
        (
            "workload: !!python/object/apply:os.system [id]\n",
            "python/object/apply:os.system is not supported",
        ),
        ("a: *b\n", "c.yaml:1: a: *b is not defined above"),
        ("a: &a [*a]\n", "c.yaml:1: a[0]: *a holds itself"),
        ("workload: m:f\nparams: {a: 1e999}\n", "c.yaml:2: params.a: 1e999 is too large for a number"),
        ("workload: m:f\nparams: {a: " + "9" * 5000 + "}\n", "a number of 5000 characters is too long"),
        ("a: 1\nb: \x00\n", "c.yaml:2: the character U+0000 is not allowed"),
        (b"a: 1\nb: \xff\n", "c.yaml:2: byte 0xff is not UTF-8 (save it as UTF-8)"),
        (b"\xef\xbb\xbfa: 1\nb: \xff\n", "c.yaml:2: byte 0xff is not UTF-8"),
        ("workload: m:f\n".encode("utf-16"), "c.yaml:1: is UTF-16 (save it as UTF-8)"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_line(
    refuse: Refuse, text: str | bytes, problem: str
) -> None:
    assert problem in refuse(text)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfworkload: m:f\r\nname: x\r\n")
    assert load_config(path).config.name == "x"


def test_billion_laughs_are_refused_at_once(refuse: Refuse) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(12)]
    started = time.monotonic()
    assert "more than 100,000 values, aliases counted in full" in refuse("\n".join(lines))
    assert time.monotonic() - started < 30  # to count them one by one takes hours


def test_aliases_that_nest_without_end_are_refused(refuse: Refuse) -> None:
    lines = ["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [*a{n}]" for n in range(5000))]
    assert "nested more than 50 deep" in refuse("\n".join(lines))


@pytest.mark.parametrize("text", ["[" * 1_000_000, "a: " + "{b: " * 200_000, "- " * 500_000, "? " * 500_000])
def test_deep_nesting_is_refused(refuse: Refuse, text: str) -> None:
    assert "nested more than 50 deep" in refuse(text)


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    started = time.monotonic()
    assert "has 3,221,225,472 bytes, which is too large for a configuration" in refusal(path)
    assert time.monotonic() - started < 30


def test_a_folder_a_fifo_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is a folder" in refusal(tmp_path)
    assert "is not a regular file" in refusal(tmp_path / "fifo")
    assert "is not a regular file" in refusal(Path("/dev/zero"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: m:f\n")
    path.chmod(0)
    assert "can't be read: Permission denied" in refusal(path)


def test_a_file_that_the_system_will_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: m:f\n")

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "c.yaml: can't be read: Permission denied" in refusal(path)


def test_a_symlink_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "can't be read" in refusal(tmp_path / "loop.yaml")


@pytest.mark.parametrize("source", ["", " ", "a\0b", "x" * 5000, "/etc/hostname/x.yaml", "\udcff.yaml"])
def test_a_path_that_cannot_be_is_refused(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert str(caught.value).isprintable()


def load_or_refuse(path: Path, data: bytes, overrides: list[str] | None = None) -> None:
    """Load the data; what is certainly wrong must be refused, and every refusal must be printable."""
    path.write_bytes(data)
    refused = None
    try:
        load_config(path, overrides or [])
    except ConfigError as error:
        refused = error
    assert refused is None or (refused.problems and str(refused).replace("\n", "").isprintable())
    assert refused is not None or not is_certainly_wrong(data)


def is_certainly_wrong(data: bytes) -> bool:
    """Whether PyYAML, without our loader, finds no mapping with a workload and known keys only."""
    try:
        events = list(yaml.parse(data.decode("utf-8-sig"), Loader=yaml.SafeLoader))
        root = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.composer.ComposerError as error:
        return "duplicate anchor" not in str(error)  # which YAML allows
    except (UnicodeDecodeError, yaml.YAMLError):
        return True
    if any(getattr(event, "tag", None) not in (None, "!") for event in events):
        return True
    if not isinstance(root, yaml.MappingNode):
        return True
    top = [key.value for key, _ in root.value]
    return "workload" not in top or not set(map(str, top)) <= KNOWN_KEYS or len(set(map(str, top))) < len(top)


yaml_like = st.text(alphabet="abkw:-?[]{}&*!|>'\"%@`#,~<=. \t\n\r0123456789eE+_\\\x85\u2028é\ufeff\x00", max_size=200)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.dates()
keys = st.sampled_from([*RunConfig.model_fields, "backend", "epochs", "ranks"]) | st.text(max_size=5) | st.integers()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=20,
)


@EXAMPLES
@given(data=st.binary(max_size=200))
def test_any_bytes_load_or_are_refused(tmp_path: Path, data: bytes) -> None:
    load_or_refuse(tmp_path / "c.yaml", data)


@EXAMPLES
@given(text=yaml_like, option=yaml_like)
def test_any_text_loads_or_is_refused(tmp_path: Path, text: str, option: str) -> None:
    load_or_refuse(tmp_path / "c.yaml", text.encode(), [option])
    load_or_refuse(tmp_path / "c.yaml", b"workload: petnames\n" + text.encode(), [f"params.x={option}"])


@EXAMPLES
@given(tree=st.dictionaries(keys, trees, max_size=6), params=st.dictionaries(keys, trees, max_size=3))
def test_any_structure_loads_or_is_refused(tmp_path: Path, tree: dict[Any, Any], params: dict[Any, Any]) -> None:
    load_or_refuse(tmp_path / "c.yaml", yaml.safe_dump({**tree, "workload": "m:f"}).encode())
    load_or_refuse(tmp_path / "c.yaml", yaml.safe_dump({"workload": "petnames", "params": params}).encode())


numbers = st.sampled_from(
    ["failure.grace_s", "failure.max_restarts", "cluster.wait_s", "checkpoint.keep", "dist.timeout_s", "code.max_mb"]
)
no_numbers = (
    st.text(max_size=5)
    | st.booleans()
    | st.just(float("nan"))
    | st.floats(max_value=-1e-9)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)


@EXAMPLES
@given(key=numbers, value=no_numbers)
def test_no_other_value_is_taken_for_a_number(key: str, value: Any) -> None:
    section, field = key.split(".")
    with pytest.raises(ConfigError) as refused:
        load_mapping({"workload": "m:f", section: {field: value}}, Path("/"))
    assert {problem.key.partition("[")[0].startswith(key) for problem in refused.value.problems} == {True}


@EXAMPLES
@given(
    section=st.sampled_from(["", "cluster.", "failure.", "results.", "tracking."]),
    key=st.from_regex("[a-z]{1,8}_x", fullmatch=True),
)
def test_no_unknown_key_is_taken(section: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_mapping({"workload": "m:f"}, Path("/"), [f"{section}{key.strip()}=1"])
    assert all(problem.message == "unknown key" for problem in refused.value.problems)


system_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10) | st.sampled_from(
    [
        "on",
        "1e-3",
        "0o7",
        "0x1f",
        "1_0",
        "12:30",
        "~",
        "",
        ".inf",
        "-.NaN",
        "2024-01-01",
        "<<",
        "=",
        " a",
        "a\n",
        "9" * 2000,
    ]
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | plain_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain_text, inner, max_size=4),
    max_leaves=20,
)
seconds = st.floats(min_value=1e-300, max_value=31_536_000)
counts = st.just("auto") | st.integers(1, 65_536)
configs = st.fixed_dictionaries(
    {"workload": st.sampled_from(["m:f", "package.module:Class.method"])},
    optional={
        "name": st.from_regex(NAME_PATTERN, fullmatch=True).filter(lambda name: not name.endswith("\n")),
        "params": st.dictionaries(plain_text, plain_values, max_size=5),
        "env": st.dictionaries(system_text.filter(lambda name: name and "=" not in name), system_text, max_size=4),
        "cluster": st.fixed_dictionaries({}, optional={"ranks": counts, "gpus": counts, "start_timeout_s": seconds}),
        "dist": st.fixed_dictionaries({"backend": st.sampled_from(["auto", "gloo", "nccl"])}),
        "checkpoint": st.fixed_dictionaries({"metric": st.none() | system_text.filter(bool)}),
        "results": st.fixed_dictionaries({"dir": system_text.filter(bool)}),
    },
)


@EXAMPLES
@given(data=configs)
def test_any_valid_configuration_is_read_back_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "c.yaml"
    resolved = resolve(RunConfig.model_validate(data), path)
    path.write_text(resolved.yaml_text, encoding="utf-8")
    assert load_config(path).config.model_dump() == resolved.recorded
