"""The section sweep: what it accepts, and what its problems say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_config, load_mapping
from ddptrain.config.sections.sweeping import Distribution
from ddptrain.errors import ConfigError


def problems(tmp_path: Path, space: str, rest: str = "trials: 2", head: str = "workload: petnames") -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(f"{head}\nsweep:\n  space:\n    {space}\n  {rest}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    return [str(problem).replace(f"{path}:", "") for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ("params.learing_rate: [1]", "4: sweep.space.params.learing_rate: there is no such parameter (did you mean "),
        ("cluster.ranks: [1, 2]", "4: sweep.space.cluster.ranks: this field can't be searched (write params.NAME;"),
        ("layers: [1, 2]", "4: sweep.space.layers: this field can't be searched (write params.layers;"),
        ("params.: [1]", "4: sweep.space.params.: this field can't be searched"),
        ("params.layers: [1, 1]", "4: sweep.space.params.layers: 1 is listed twice"),
        ("params.layers: []", "4: sweep.space.params.layers: "),
        ("params.layers: {uniform: [1, 3]}", "4: sweep.space.params.layers: 1.0 is not possible: "),
        ("params.dropout: {uniform: [0, 2]}", "4: sweep.space.params.dropout: 2.0 is not possible: "),
        ("params.dropout: [0.1, x]", '4: sweep.space.params.dropout: the text "x" is not possible: '),
        (
            "params.grad_clip: {log: [0, 3]}",
            "4: sweep.space.params.grad_clip.log: the lower limit is 0, and has no log",
        ),
        ("params.grad_clip: {log: [3, 1]}", "4: sweep.space.params.grad_clip.log: the first limit is 3, the second 1"),
        ("params.grad_clip: {log: [1]}", "4: sweep.space.params.grad_clip.log: "),
        (
            "params.grad_clip: {}",
            "4: sweep.space.params.grad_clip: expected one of uniform, log, int, log_int, got none",
        ),
        (
            "params.grad_clip: {log: [1, 3], step: 1}",
            "4: sweep.space.params.grad_clip.step: is given, but log has none",
        ),
        (
            "params.layers: {int: [1.5, 3]}",
            "4: sweep.space.params.layers.int: the limits 1.5 and 3 are not whole numbers",
        ),
        ("params.layers: {int: [1, 3], step: 3}", "4: sweep.space.params.layers.step: is 3, more than the distance"),
        ("params.layers: {log: [1, 3], ints: 2}", "4: sweep.space.params.layers.ints: unknown key"),
        ("prepare.precison: [bf16]", "4: sweep.space.prepare.precison: there is no such parameter"),
        ("args.lr: [1]", "4: sweep.space.args.lr: is given, but the workload is not a script (write params.lr)"),
        ("env.API_KEY: [a]", "4: sweep.space.env.API_KEY: has the name of a secret, and sweep.json shows all values"),
        ("env.OMP: [1]", "4: sweep.space.env.OMP: expected text for an environment variable"),
    ],
)
def test_wrong_space_is_named_with_its_line(tmp_path: Path, space: str, problem: str) -> None:
    (found,) = problems(tmp_path, space)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("mode: max", "sweep.trials: is required, and not given (write trials: 32, or for: 2h)"),
        ("trials: 0", "5: sweep.trials: "),
        ("for: soon", 'sweep.for: the text "soon" is not a duration: write a number with s, m, h, d or w, as in'),
        ("trails: 3", "5: sweep.trails: unknown key (did you mean sweep.trials?)"),
        ("search: grid", "4: sweep.space.params.dropout: has no list of values, which search: grid needs"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, rest: str, problem: str) -> None:
    found = problems(tmp_path, "params.dropout: {uniform: [0, 0.5]}", rest)
    assert any(problem in each and each.count("soon") < 2 for each in found)


def test_the_forms_of_a_space_and_of_methods_are_read(tmp_path: Path) -> None:
    space = {
        "params.learning_rate": {"log": [1e-4, 1e-1]},
        "params.hidden_size": [128, 256],
        "params.dropout": {"uniform": [0, 0.5], "step": 0.1},
    }
    given: dict[str, Any] = {"space": space, "for": "2h", "search": "tpe", "prune": {"asha": {"reduction_factor": 4}}}
    sweep = load_mapping({"workload": "petnames", "sweep": given}, tmp_path).config.sweep
    assert sweep is not None
    assert (sweep.for_, sweep.searcher, sweep.pruner) == (7200.0, "tpe", "asha")
    assert (sweep.metric, sweep.mode, sweep.parallel) == ("val/loss", "min", "auto")
    again = load_mapping({"workload": "petnames", "sweep": sweep.model_dump()}, tmp_path).config.sweep
    assert again == sweep


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"int": [1, 4]}, [1, 2, 3, 4]),
        ({"int": [1, 8], "step": 3}, [1, 4, 7]),
        ({"uniform": [0, 0.3], "step": 0.1}, [0.0, 0.1, 0.2, 0.3]),
        ({"uniform": [0, 1]}, None),
        ({"log_int": [1, 100]}, None),
        ({"int": [0, 1_000_000]}, None),
    ],
)
def test_values_of_an_interval(given: dict[str, Any], values: list[float] | None) -> None:
    assert Distribution.model_validate(given).values() == values


def test_params_are_checked_together_with_the_first_searched_values(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "workload: images\nparams: {weights: IMAGENET1K_SWAG_E2E_V1}\n"
        "sweep: {space: {params.architecture: [vit_b_16]}, trials: 2, metric: x}\n"
    )
    with pytest.raises(ConfigError, match="resnet50 has no such weights"):
        load_config(path)
    assert load_config(path, sweeps=True).config.params == {
        "architecture": "vit_b_16",
        "weights": "IMAGENET1K_SWAG_E2E_V1",
    }


def test_a_problem_of_a_searched_param_is_named_once_at_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("workload: petnames\nsweep: {space: {params.nope: [1], params.layers: [a]}, trials: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, sweeps=True)
    assert [each.key for each in caught.value.problems] == ["sweep.space.params.nope", "sweep.space.params.layers"]
