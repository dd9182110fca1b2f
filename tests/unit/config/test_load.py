"""Loading a configuration: values, options, limits, what is recorded, and that anything else is refused.

The wording of each refusal is in tests/commands/golden/config_errors.txt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.config.load import load_cluster, load_config, load_mapping
from ddptrain.config.resolved import resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.workload_check import check_workload
from ddptrain.errors import ConfigError, Problem

Load = Callable[..., RunConfig]
EXAMPLES = settings(max_examples=200)
FEWER = settings(max_examples=80)  # each example takes long
KNOWN_KEYS = {field.alias or name for name, field in RunConfig.model_fields.items()}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def call(text: str | bytes, *overrides: str) -> RunConfig:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, overrides).config

    return call


def problems_of(source: Path | str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    assert caught.value.exit_code == 2 and str(caught.value).replace("\n", "").isprintable()
    return caught.value.problems


def test_params_stay_as_given_and_are_resolved_in_the_record(load: Load, tmp_path: Path) -> None:
    config = load("workload: petnames\nparams: {epochs: 3, learning_rate: 1e-3}\n", "params.epochs=4")
    assert config.params == {"epochs": 4, "learning_rate": 0.001}
    resolved = resolve(config, tmp_path).recorded["params"]
    assert (resolved["epochs"], resolved["names"], resolved["weights"]) == (4, "builtin", None)
    assert resolve(load("workload: m:f\nparams: {a: 1}\n"), tmp_path).recorded["params"] == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, word) for word in ("on", "off", "yes", "no", "y", "12:30", "2024-01-31", "1_000", "=", "0b1")),
        *((word, None) for word in ("", "~", "null")),
        ("true", True),
        ("False", False),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1E+2", -100.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("'3'", "3"),
        ('"on"', "on"),
        ("é", "é"),
        ("|\n  a\n  b", "a\nb\n"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(load: Load, text: str, value: object) -> None:
    loaded = load(f"workload: m:f\nparams:\n x: {text}\n").params["x"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_number_in_the_environment_stays_as_it_is_written(load: Load) -> None:
    assert load("workload: m:f\nenv: {A: 010, B: 1.50}\n", "env.C=1e3").env == {"A": "010", "B": "1.50", "C": "1e3"}


def test_an_option_sets_a_field_of_the_search_space(load: Load) -> None:
    text = "workload: petnames\nsweep: {trials: 2, space: {params.epochs: [1, 2]}}\n"
    sweep = load(text, "sweep.space.params.epochs=[3]", "sweep.space.params.seed=[4]").sweep
    assert sweep is not None and dict(sweep.space) == {"params.epochs": [3], "params.seed": [4]}


def test_an_option_makes_mappings_on_the_way(load: Load) -> None:
    config = load("workload: m:f\nparams:\n", "params.a.b=[1, {c: on}]", "cluster.ranks=4", "name=x")
    assert config.params == {"a": {"b": [1, {"c": "on"}]}}
    assert (config.cluster.ranks, config.name) == (4, "x")


def test_the_last_of_equal_options_wins(load: Load) -> None:
    assert load("workload: petnames\n", "params.epochs=1", "params.epochs=2").params == {"epochs": 2}


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("", ""),
        ("=3", ""),
        ("params..x=3", ""),
        ("workload.x=3", "workload.x"),
        ("params.names.0=3", "params.names.0"),
        ("params.names=*x", "params.names"),
        ("params.names=\udcff", "params.names"),
        (".".join(["a"] * 60) + "=1", ""),
        ("params.names=" + "[" * 60 + "]" * 60, "params.names"),
    ],
)
def test_a_malformed_option_is_refused_by_its_name(tmp_path: Path, option: str, key: str) -> None:
    (tmp_path / "c.yaml").write_text("workload: petnames\nparams: {names: builtin}\n")
    (problem,) = problems_of(tmp_path / "c.yaml", option)
    assert problem.where.startswith(f"--set {option[:5]}".rstrip()) and problem.key.startswith(key)


def test_option_is_the_place_of_what_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: petnames\nparams:\n  epochs: 0\n  seed: -1\ncluster:\n  ranks: 0\n")
    found = problems_of(path, "params={seed: -2}", "cluster.gpus=-1")
    assert [(each.where, each.key) for each in found] == [
        (f"{path}:6", "cluster.ranks"),
        ("--set params={seed: -2}", "params.seed"),
        ("--set cluster.gpus=-1", "cluster.gpus"),
    ]


def test_thousands_of_problems_are_cut_short(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workload: petnames\n" + "".join(f"k{number}: 1\n" for number in range(3000)))
    found = problems_of(tmp_path / "c.yaml")
    assert (len(found), found[-1].message) == (51, "and 2,950 more problems")


def test_a_byte_order_mark_and_windows_line_ends_are_fine(load: Load) -> None:
    assert load(b"\xef\xbb\xbfworkload: m:f\r\nname: x\r\n").name == "x"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"a: 1\nb: \xff\n", 2),
        ("workload: m:f\n".encode("utf-16"), 1),
        (b"a: 1\nb: \x00\n", 2),
        (b"[" * 1_000_000, 1),
        (b"a: " + b"{b: " * 200_000, 1),
        (b"- " * 500_000, 1),
        (b"? " * 500_000, 1),
        (b"a: &a\n- *a\n", 2),
    ],
)
def test_bytes_that_are_no_configuration_are_refused_with_their_line(tmp_path: Path, data: bytes, line: int) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    assert problems_of(path)[0].where == f"{path}:{line}"


def test_a_large_file_a_folder_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(3 << 30)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for source in (tmp_path / "huge.yaml", tmp_path, tmp_path / "fifo", tmp_path / "loop.yaml", Path("/dev/zero")):
        assert problems_of(source)[0].where == str(source)


@pytest.mark.parametrize("source", ["", " ", "a\0b", "x" * 5000, "/etc/hostname/x.yaml", "\udcff.yaml"])
def test_a_path_that_cannot_be_is_refused(source: str) -> None:
    assert len(problems_of(source)) == 1


def test_a_bare_name_is_a_shipped_example_unless_it_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("petnames").config.workload == "petnames"
    (tmp_path / "petnames").write_text("workload: m:f\n")
    assert load_config("petnames").config.workload == "m:f"


def test_a_dump_is_read_back_equal(load: Load) -> None:
    params = "{a: ['1e-3', 'on', '0o7', 1e-5, .inf, '', 'x: y', '<<'], '3': null, 'no': \"\\0\"}"
    text = f"workload: m:f\nparams: {params}\n"
    config = load(text, "cluster.backend=address", "cluster.address=tcp://h:1", "env.A=a")
    assert load(resolve(config, Path("c.yaml")).yaml_text) == config


def test_a_dump_leaves_secrets_out(load: Load) -> None:
    config = RunConfig(
        workload="m:f",
        env={
            "WANDB_API_KEY": "hunter2",
            "HTTPS_PROXY": "http://me:hunter2@proxy:80",
            "TOKENIZERS_PARALLELISM": "1",
        },
        params={
            "names": ["s3://u:hunter2@b/x?sig=1&X-Amz-Signature=hunter2"],
            "options": {"secret": "hunter2", "key": 3},
            "headers": {
                "Authorization": "Bearer hunter2",
                "Cookie": "hunter2",
                "connection_string": "AccountKey=hunter2",
            },
        },
        tracking=TrackingConfig.model_validate(
            {"other": [{"name": "a:B", "options": {"x": {"credentials": {"user": ["hunter2"], "on": True}}, "pin": 4}}]}
        ),
    )
    resolved = resolve(config, Path("c.yaml"))
    assert "hunter2" not in resolved.yaml_text + repr(resolved.recorded) + repr(resolved)
    assert "hunter2" in resolved.secrets
    read = load(resolved.yaml_text)
    assert read.model_dump() == resolved.recorded
    assert read.env == {
        "WANDB_API_KEY": "<left out>",
        "HTTPS_PROXY": "http://<left out>@proxy:80",
        "TOKENIZERS_PARALLELISM": "1",
    }
    assert read.params["options"] == {"secret": "<left out>", "key": 3}
    assert read.tracking.other[0].options == {"x": {"credentials": {"user": ["<left out>"], "on": True}}, "pin": 4}


def test_urls_of_notifications_are_recorded_nowhere() -> None:
    notify = {"urls": ["slack://tokentoken/b/c", "env:A_URL"], "heartbeat": "https://host/uuid-uuid"}
    found = load_mapping({"workload": "petnames", "notify": notify}, Path())
    assert "tokentoken" not in found.yaml_text and "uuid-uuid" not in found.yaml_text
    assert "env:A_URL" in found.yaml_text
    assert {"slack://tokentoken/b/c", "https://host/uuid-uuid"} <= set(found.secrets)
    assert "tokentoken" not in repr(found) + repr(found.config)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("{address: 'tcp://h:1'}", "address"),
        ("{address: s.json}", "address"),
        ("{ssh: {hosts: [a]}}", "ssh"),
        ("{class: package.Cluster, kwargs: {n: 1}}", "class"),
        ("{ranks: 2}", "local"),
    ],
)
def test_backend_follows_from_its_section(load: Load, text: str, backend: str) -> None:
    assert load(f"workload: petnames\ncluster: {text}\n").cluster.backend == backend


def test_cluster_file_needs_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cluster: {ssh: {hosts: [a, b]}, idle_timeout_s: 60}\n")
    found = load_cluster(path, ["cluster.ssh.ranks_per_host=4"])
    assert found.ssh is not None and (found.ssh.hosts, found.ssh.ranks_per_host) == (["a", "b"], 4)
    assert load_cluster(None, ["cluster.ranks=3"]).ranks == 3
    with pytest.raises(ConfigError) as caught:
        load_cluster(None, ["cluster.ssh.hsots=[a]"])
    assert "cluster.ssh.hsots" in [problem.key for problem in caught.value.problems]


def test_hosts_of_a_cluster_may_have_other_modules(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: nothere:main\ncluster: {address: 'tcp://127.0.0.1:1'}\n")
    check_workload(load_config(path))
    with pytest.raises(ConfigError):
        check_workload(load_config(path, ["cluster={}"]))


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


@FEWER
@given(tree=st.dictionaries(keys, trees, max_size=6), params=st.dictionaries(keys, trees, max_size=3))
def test_any_structure_loads_or_is_refused(tmp_path: Path, tree: dict[Any, Any], params: dict[Any, Any]) -> None:
    load_or_refuse(tmp_path / "c.yaml", yaml.safe_dump({**tree, "workload": "m:f"}).encode())
    load_or_refuse(tmp_path / "c.yaml", yaml.safe_dump({"workload": "petnames", "params": params}).encode())


numbers = st.sampled_from(
    ["failure.grace_s", "failure.max_restarts", "cluster.wait_s", "checkpoint.keep", "dist.timeout_s"]
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


@FEWER
@given(data=configs)
def test_any_valid_configuration_is_read_back_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "c.yaml"
    resolved = resolve(RunConfig.model_validate(data), path)
    path.write_text(resolved.yaml_text, encoding="utf-8")
    assert load_config(path).config.model_dump() == resolved.recorded
