"""Loading and dumping: what is accepted, what is refused, and how that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ddptrain.config import config_file as config_files
from ddptrain.config import plugin_names
from ddptrain.config.config_file import shipped_configs
from ddptrain.config.load import (
    load_cluster,
    load_config,
)
from ddptrain.config.resolved import resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.errors import ConfigError

Load = Callable[..., RunConfig]
Refuse = Callable[..., list[str]]


class Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    momentum: float = 0.9


class ToyParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    epochs: int = Field(25, ge=1)
    lr: float = Field(1e-3, allow_inf_nan=False)
    sizes: tuple[int, ...] = ()
    amp: bool = False
    context: Literal["window", "full"] = "window"
    note: str | list[str] = ""
    optimizer: Optimizer | None = None


@pytest.fixture(autouse=True)
def toy_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("toy_params")
    module.ToyParams = ToyParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_params", module)
    monkeypatch.setitem(plugin_names.BUILT_IN, "toy", plugin_names.BuiltIn("toy:train", "toy_params:ToyParams"))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def call(text: str | bytes, *overrides: str) -> RunConfig:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, overrides).config

    return call


@pytest.fixture
def refuse(load: Load, tmp_path: Path) -> Refuse:
    """Every problem as a line, the file's path cut to its name."""

    def call(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return call


def test_a_file_is_loaded_with_its_text_and_path(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: toy  # mine\nparams: {epochs: 3, lr: 1e-3, sizes: [1, 2]}\n")
    loaded = load_config(str(path), ["params.epochs=4"])
    assert loaded.path == path
    assert loaded.config.params == {"epochs": 4, "lr": 0.001, "sizes": [1, 2]}


def test_params_stay_as_given_and_are_resolved_in_the_record(load: Load, tmp_path: Path) -> None:
    config = load("workload: toy\nparams: {epochs: 3, sizes: [1]}\n")
    assert config.params == {"epochs": 3, "sizes": [1]}
    resolved = resolve(config, tmp_path).recorded["params"]
    assert resolved["sizes"] == [1]
    assert (resolved["epochs"], resolved["lr"], resolved["optimizer"]) == (3, 0.001, None)
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


def test_anchors_and_aliases_are_expanded(load: Load) -> None:
    config = load("workload: m:f\nparams: {a: &a {b: [1]}, c: *a}\n", "params.c.b=2")
    assert config.params == {"a": {"b": [1]}, "c": {"b": 2}}


def test_an_unknown_key_names_its_line_its_full_key_and_the_nearest_match(refuse: Refuse) -> None:
    text = "workload: toy\nparams:\n  epochz: 3\n"
    assert refuse(text) == ["c.yaml:3: params.epochz: unknown key (did you mean params.epochs?)"]


def test_an_unknown_key_of_an_option_names_the_option(refuse: Refuse) -> None:
    assert refuse("workload: toy\n", "params.epochz=3") == [
        "--set params.epochz=3: params.epochz: unknown key (did you mean params.epochs?)"
    ]


def test_an_unknown_key_inside_an_optional_model_is_matched_there(refuse: Refuse) -> None:
    assert refuse("workload: toy\nparams:\n  optimizer:\n    momentun: 1\n") == [
        "c.yaml:4: params.optimizer.momentun: unknown key (did you mean params.optimizer.momentum?)"
    ]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("arg: [1]", "workload.arg: unknown key (did you mean workload.args?)"),
        ("args: --lr 0.1", 'workload.args: expected a list, got the text "--lr 0.1" (write a list, as [a, b])'),
    ],
)
def test_a_wrong_field_of_a_script_is_named_not_the_script(refuse: Refuse, section: str, problem: str) -> None:
    assert refuse(f"workload: {{script: {Path(__file__)}, {section}}}\n") == [f"c.yaml:1: {problem}"]


def test_an_unknown_key_inside_a_mapping_with_free_names_lists_the_known_ones(refuse: Refuse) -> None:
    text = "workload: toy\nsweep: {trials: 2, space: {params.epochs: {max: 1}}}\n"
    assert refuse(text) == [
        "c.yaml:2: sweep.space.params.epochs.max: unknown key (known are: int, log, log_int, step, uniform)"
    ]


def test_an_option_sets_a_field_of_the_search_space(load: Load) -> None:
    text = "workload: toy\nsweep: {trials: 2, space: {params.lr: [1, 2]}}\n"
    sweep = load(text, "sweep.space.params.lr=[3]", "sweep.space.params.context=[full]").sweep
    assert sweep is not None and sweep.space["params.lr"] == [3]
    assert sweep.space["params.context"] == ["full"]


def test_known_keys_are_listed_once_for_the_file_of_another_tool(refuse: Refuse) -> None:
    found = refuse("workload: toy\ngadget: adam\nlogger: true\nclustr: 1\nzzz: 1\n")
    assert found[0].startswith("c.yaml:2: gadget: unknown key (known are: checkpoint, cluster, code, ")
    assert found[1:] == [
        "c.yaml:3: logger: unknown key",
        "c.yaml:4: clustr: unknown key (did you mean cluster?)",
        "c.yaml:5: zzz: unknown key",
    ]


def test_unknown_key_that_begins_several_keys_names_all_of_them(refuse: Refuse) -> None:
    assert refuse("workload: toy\ncheckpoint: {every: 3}\n") == [
        (
            "c.yaml:2: checkpoint.every: unknown key "
            "(did you mean checkpoint.every_epochs, checkpoint.every_steps or checkpoint.every_s?)"
        )
    ]


@pytest.mark.parametrize(("key", "home"), [("ranks", "cluster.ranks"), ("epochs", "params.epochs")])
def test_a_key_in_the_wrong_section_is_sent_home(refuse: Refuse, key: str, home: str) -> None:
    assert refuse(f"workload: toy\n{key}: 2\n") == [f"c.yaml:2: {key}: unknown key (did you mean {home}?)"]


ALL_AT_ONCE = """\
c.yaml:3: cluster.ranks: expected 'auto' or at least 1, got -2
c.yaml:4: cluster.gpus: expected 'auto' or a whole number, got the text "3" (write the number without \
quotes, commas or underscores)
c.yaml:5: cluster.backend: there is no such cluster backend, got the text "adress" (did you mean address?)
c.yaml:8: params.epochs: is given twice: on line 7 and on line 8 (keep one of them)
c.yaml:9: params.amp: expected true or false, got the text "yes" (write true or false, without quotes)
c.yaml:10: params.lr: expected a finite number, got nan
c.yaml:11: params.sizes: expected a list, got 4
c.yaml:12: params.note: expected text or a list, got 3 (write it in quotes)
c.yaml:13: env.A: expected text, got a list
c.yaml:14: name: expected a name of 1 to 64 lower-case letters, digits, dots, dashes and underscores that begins with \
a letter or digit, got the text "My Run" (as in my-run)
c.yaml:15: dist.timeout_s: expected more than 0, got 0
--set params.epochs=-1: params.epochs: expected at least 1, got -1
--set nonsense: expected key=value (as in --set params.epochs=3)
"""


def test_all_problems_are_told_at_once_in_file_order(refuse: Refuse) -> None:
    text = """\
workload: toy
cluster:
  ranks: -2
  gpus: '3'
  backend: adress
params:
  epochs: 3
  epochs: 4
  amp: yes
  lr: .nan
  sizes: 4
  note: 3
env: {A: [1]}
name: My Run
dist: {timeout_s: 0}
"""
    assert refuse(text, "params.epochs=-1", "nonsense") == ALL_AT_ONCE.splitlines()


def test_thousands_of_problems_are_cut_short(refuse: Refuse) -> None:
    lines = refuse("workload: toy\n" + "".join(f"k{number}: 1\n" for number in range(3000)))
    assert len(lines) == 51
    assert lines[-1] == "c.yaml: and 2,950 more problems"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cluster: {backend: address}", "cluster.address: is required, as cluster.backend is address"),
        ("cluster: {backend: local, address: 'tcp://h:1'}", "cluster.address: is given, but cluster.backend is local"),
        ("cluster: {gpus: 0}\ndist: {backend: nccl}", "dist.backend: is nccl, which needs GPUs"),
        ("cluster: {ranks: 0}", "cluster.ranks: expected 'auto' or at least 1, got 0"),
        ("cluster: {ranks: true}", "cluster.ranks: expected 'auto' or a whole number, got true"),
        ("cluster: {wait_s: .inf}", "cluster.wait_s: expected a finite number, got inf"),
        ("cluster: {wait_s: 10m}", 'cluster.wait_s: expected a number, got the text "10m" (write the seconds: 600)'),
        ("cluster: {wait_s: soon}", 'cluster.wait_s: expected a number, got the text "soon"'),
        ("params: {epochs: 3.0}", "params.epochs: expected a whole number, got 3.0"),
        ("params: {sizes: [1, x]}", 'params.sizes[1]: expected a whole number, got the text "x"'),
        ("params: null", "params: expected a mapping, as key: value, got nothing"),
        ("params: [1]", "params: expected a mapping, as key: value, got a list"),
        ("env: {'A=B': x}", "env.A=B: is not a name of an environment variable"),
        ("results: {dir: ''}", "results.dir: expected text of 1 or more characters"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(refuse: Refuse, text: str, problem: str) -> None:
    lines = refuse(f"workload: toy\n{text}\n")
    assert len(lines) == 1
    assert problem in lines[0]
    assert lines[0].startswith("c.yaml:2: ") or lines[0].startswith("c.yaml:3: dist")


def test_a_missing_workload_is_asked_for(refuse: Refuse) -> None:
    assert refuse("name: x\n") == ["c.yaml:1: workload: is required, and not given (as in workload: train:train)"]


def test_an_unknown_workload_is_told_with_its_line(refuse: Refuse) -> None:
    (line,) = refuse("name: x\nworkload: petnamez\n")
    assert line.startswith('c.yaml:2: workload: there is no such workload, got the text "petnamez" (did you mean')


def test_an_option_makes_mappings_on_the_way(load: Load) -> None:
    config = load("workload: m:f\nparams:\n", "params.a.b=[1, {c: on}]", "cluster.ranks=4", "name=x=y"[:6])
    assert config.params == {"a": {"b": [1, {"c": "on"}]}}
    assert (config.cluster.ranks, config.name) == (4, "x")


def test_the_last_of_equal_options_wins(load: Load) -> None:
    assert load("workload: toy\n", "params.epochs=1", "params.epochs=2").params == {"epochs": 2}


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("", "expected key=value"),
        ("=3", "expected key=value"),
        ("params..x=3", "expected key=value"),
        ("workload.x=3", 'workload is the text "toy", which has no keys (set workload itself)'),
        ("params.sizes.0=3", "params.sizes is a list, which has no keys"),
        ("params.note=*", "not valid YAML"),
        ("params.note=*x", "*x is not defined above (quote text that starts with *)"),
        ("params.note=[", "not valid YAML"),
        ("params.note=\udcff", "U+DCFF is not allowed"),
        (".".join(["a"] * 60) + "=1", "more than 50 parts"),
        ("a.b.c.d=" + "[" * 48 + "]" * 48, "nested more than 50 deep"),
    ],
)
def test_a_malformed_option_is_refused_by_name(refuse: Refuse, option: str, problem: str) -> None:
    lines = refuse("workload: toy\nparams: {sizes: [1]}\n", option)
    assert len(lines) == 1
    assert lines[0].startswith(f"--set {option[:5]}".rstrip())
    assert problem in lines[0]
    assert lines[0].isprintable()


def test_a_secret_is_not_repeated_by_an_error(refuse: Refuse) -> None:
    lines = refuse(
        "workload: toy\nenv: {MY_TOKEN: [8675309]}\n", "env.API_KEY=[31337]", "results.dir=[s3://u:hunter2@b]"
    )
    assert len(lines) == 3
    assert not any(secret in line for line in lines for secret in ("8675309", "31337", "hunter2"))


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


def test_a_bare_name_is_a_shipped_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "configs").mkdir(parents=True)
    (package / "configs" / "toys.yaml").write_text("workload: toy\n")
    monkeypatch.setattr(config_files, "__file__", str(package / "config" / "files.py"))
    monkeypatch.chdir(tmp_path)
    assert shipped_configs() == {"toys": package / "configs" / "toys.yaml"}
    assert load_config("toys").path == package / "configs" / "toys.yaml"
    with pytest.raises(ConfigError, match=r"toyz: there is no such file \(did you mean toys\?\)"):
        load_config("toyz")
    with pytest.raises(ConfigError, match=r"zebra: there is no such file \(shipped examples are: toys\)"):
        load_config("zebra")


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "petnames.yaml").write_text("workload: toy\n")
    with pytest.raises(ConfigError, match=r"petname\.yaml: there is no such file \(did you mean .*/petnames\.yaml\?\)"):
        load_config(tmp_path / "petname.yaml")


# --- the cluster's section ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cluster: {backend: address}", "cluster.address: is required, as cluster.backend is address"),
        ("cluster: {backend: ssh}", "cluster.ssh.hosts: is required, as cluster.backend is ssh"),
        ("cluster: {backend: kubernetes}", "cluster.kubernetes.image: is required, as cluster.backend is kubernetes"),
        ("cluster: {backend: class}", "cluster.class: is required, as cluster.backend is class"),
        ("cluster: {backend: local, ssh: {hosts: [a]}}", "cluster.ssh: is given, but cluster.backend is local"),
        ("cluster: {backend: local, kwargs: {n: 1}}", "cluster.kwargs: is given, but cluster.backend is local"),
        ("cluster: {options: {n: 1}}", "cluster.options: is given, but cluster.backend is local"),
        ("cluster: {tls: {ca_file: a, cert_file: b, key_file: c}}", "cluster.tls: is given, but cluster.backend is"),
        ("cluster: {address: 'tcp://h:1', scheduler_file: s}", "cluster.scheduler_file: is given, and so is"),
        ("cluster: {address: 'tcp://h:65536'}", "cluster.address: has a wrong port: expected one from 1 to 65535"),
        ("cluster: {address: 'tls://[::1]:0'}", "cluster.address: has a wrong port: expected one from 1 to 65535"),
        ("cluster: {ssh: {hosts: []}}", "cluster.ssh.hosts: expected 1 or more values"),
        ("cluster: {ssh: {hosts: [-oX]}}", "cluster.ssh.hosts[0]: is not a host: ssh would read it as an option"),
        ('cluster: {slurm: {partition: "a\\nb"}}', "cluster.slurm.partition:"),
        ("cluster: {name: Dev}", "cluster.name: expected a name of 1 to 64 lower-case letters, digits"),
    ],
)
def test_section_of_the_cluster_says_what_does_not_go_together(refuse: Refuse, text: str, problem: str) -> None:
    (told,) = refuse(f"workload: toy\n{text}\n")
    assert problem in told and told.startswith("c.yaml:2")


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("{address: 'tcp://h:1'}", "address"),
        ("{scheduler_file: s.json}", "address"),
        ("{ssh: {hosts: [a]}}", "ssh"),
        ("{class: package.Cluster, kwargs: {n: 1}}", "class"),
        ("{ranks: 2}", "local"),
    ],
)
def test_backend_follows_from_its_section(load: Load, text: str, backend: str) -> None:
    assert load(f"workload: toy\ncluster: {text}\n").cluster.backend == backend


def test_cluster_file_needs_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cluster: {ssh: {hosts: [a, b]}, idle_timeout_s: 60}\n")
    found = load_cluster(path, ["cluster.ssh.ranks_per_host=4"])
    assert found.ssh is not None and (found.ssh.hosts, found.ssh.ranks_per_host) == (["a", "b"], 4)
    assert load_cluster(None, ["cluster.ranks=3"]).ranks == 3
    with pytest.raises(ConfigError, match=r"cluster\.ssh\.hsots: unknown key \(did you mean cluster\.ssh\.hosts"):
        load_cluster(None, ["cluster.ssh.hsots=[a]"])


def test_configuration_with_a_class_is_written_as_it_is_read(tmp_path: Path, load: Load) -> None:
    config = load("workload: toy\ncluster: {class: a.B, kwargs: {token: secret, n: 2}}\n")
    text = resolve(config, tmp_path / "c.yaml").yaml_text
    assert "class: a.B" in text and "secret" not in text


def test_mode_of_the_wandb_library_is_answered_with_its_variable(refuse: Refuse) -> None:
    (problem,) = refuse("workload: toy\ntracking: {wandb: {mode: offline}}\n")
    assert "tracking.wandb.mode: expected off, rank0, process or shared" in problem
    assert "env: {WANDB_MODE: offline}" in problem
    (problem,) = refuse("workload: toy\ntracking: {wandb: {mode: offlin}}\n")
    assert 'got the text "offlin", a WANDB_MODE' in problem
    assert "env: {WANDB_MODE: offline}" in problem


def test_script_given_as_configuration_names_the_command_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "train.py")
    script = tmp_path / "train.py"
    assert str(caught.value) == f"{script}: is not a YAML file (ddptrain run {script} runs a script)"


def test_missing_file_names_the_files_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "spirals.yaml").write_text("workload: petnames\n")
    with pytest.raises(ConfigError, match=r"there is no such file \(in this folder: spirals\.yaml\)"):
        load_config(tmp_path / "xyz")


def test_key_in_the_wrong_section_is_named_with_its_full_key(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workload: petnames\ncluster:\n  hosts: [a]\n")
    with pytest.raises(ConfigError, match=r"cluster\.hosts: unknown key \(did you mean cluster\.ssh\.hosts\?\)"):
        load_config(tmp_path / "c.yaml")
