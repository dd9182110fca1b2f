from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames import train as workload
from ddptrain.workloads.petnames.generate import generate_names, sample_names
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.petnames.names import STOP_ID, Split, decode, encode
from ddptrain.workloads.petnames.params import PetnamesParams

if TYPE_CHECKING:
    pass


def untrained(context: str, stop_bias: float = 1.0) -> CharacterModel:
    torch.manual_seed(0)
    params = PetnamesParams.model_validate({"context": context, "hidden_size": 8, "layers": 2})
    model = CharacterModel(ModelConfig.of(params)).eval()
    model.linear.bias.data[STOP_ID] += stop_bias
    return model


def save_checkpoint(run_dir: Path, model: CharacterModel, name: str = "step-1") -> Path:
    folder = run_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    extra = {"model_config": model.config.plain()}
    torch.save({"optimizer": None, "step": 1, "epoch": 1, "metrics": {}, "extra": extra}, folder / "state.pt")
    (run_dir / "checkpoints" / "latest").write_text(f"{name}\n")
    return folder


@pytest.fixture(params=["window", "full"])
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run whose model makes up names at random."""
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "run.json").write_text('{"workload": "petnames"}')
    (tmp_path / "artifacts" / "names.json").write_text('{"train": [], "held_out": []}')
    save_checkpoint(tmp_path, untrained(request.param))
    return tmp_path


def know(run_dir: Path, train: list[str], held_out: list[str]) -> None:
    (run_dir / "artifacts" / "names.json").write_text(json.dumps({"train": train, "held_out": held_out}))


def test_the_same_seed_gives_the_same_names(run_dir: Path) -> None:
    first = generate_names(run_dir, 30, seed=7)
    assert first == generate_names(run_dir, 30, seed=7)
    assert first.names != generate_names(run_dir, 30, seed=8).names
    assert len(set(first.names)) == 30


def test_without_a_seed_the_one_used_is_told(run_dir: Path) -> None:
    made = generate_names(run_dir, 5)
    assert generate_names(run_dir, 5, seed=made.seed) == made


def test_known_names_are_replaced_whatever_their_case(run_dir: Path) -> None:
    before = generate_names(run_dir, 20, seed=1)
    know(run_dir, [name.upper() for name in before.names[:5]], [name.lower() for name in before.names[5:8]])
    after = generate_names(run_dir, 20, seed=1)
    assert set(after.names).isdisjoint(before.names[:8])
    assert len(after.names) == 20
    assert after.dropped_known >= 8
    assert generate_names(run_dir, 20, seed=1, keep_known=True).names == before.names


def test_giving_up_is_said(run_dir: Path) -> None:
    made = generate_names(run_dir, 40, temperature=1e-9, seed=1)
    assert made.limit_reached
    assert len(made.names) <= 1
    assert made.attempts == 20 * 40 + 1000


def test_names_begin_with_the_prefix(run_dir: Path) -> None:
    made = generate_names(run_dir, 10, prefix=" Mr. ", seed=1)
    assert all(name.startswith("Mr.") for name in made.names)
    assert all(name == name.title() for name in made.names)


def test_examples_of_a_run_are_a_table_of_distinct_names() -> None:
    logged: list[tuple[Any, ...]] = []
    ctx: Any = SimpleNamespace(log_table=lambda *args, step: logged.append((*args, step)))
    model = untrained("full").train()
    before = torch.get_rng_state()
    workload.log_examples(ctx, model, Split(("rex",), ()), 1, 7)
    ((name, columns, rows, step),) = logged
    assert (name, columns, step) == ("generated_names", ("name", "is_known"), 7)
    assert rows and len({text for text, _ in rows}) == len(rows) and not any(known for _, known in rows)
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_a_name_that_is_longer_than_wanted_is_given_up() -> None:
    names = sample_names(untrained("full"), 200, "", 1.0, torch.Generator().manual_seed(0), 5)
    ended = [name for name in names if name is not None]
    assert 0 < len(ended) < 200 and all(len(name) < 5 for name in ended)


@pytest.mark.parametrize("context", ["window", "full"])
def test_symbols_are_those_that_the_model_finds_likely_after_the_name_so_far(context: str) -> None:
    """Nearly without temperature each symbol is the best one, of the model that reads the whole text again."""
    model = untrained(context, stop_bias=0.0)
    (name,) = {*sample_names(model, 3, "lu", 1e-9, torch.Generator().manual_seed(0), 12)}
    text = "lu"
    while len(text) < 12 and not text.endswith("+"):
        read = text.rjust(8, "*")[-8:] if context == "window" else f"*{text}"
        with torch.inference_mode():
            scores = model(torch.tensor([encode(read)]), torch.tensor([len(read)]))[-1]
        text += decode([1 + int(scores[1:].argmax())])
    assert name == (text.removesuffix("+") if text.endswith("+") else None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "--count must be at least 1, not 0"),
        ({"temperature": 0.0}, "--temperature must be above 0, not 0.0"),
        ({"temperature": float("nan")}, "--temperature must be above 0, not nan"),
        ({"seed": 10**30}, "--seed must be between 0 and 9223372036854775807, not 10{30}$"),
        ({"prefix": "r2-d2"}, "--prefix 'r2-d2' has '2', which no name may contain"),
        ({"prefix": "lu+"}, "--prefix 'lu\\+' has '\\+'"),
    ],
)
def test_impossible_arguments_are_refused(run_dir: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_names(run_dir, **{"count": 3, **arguments})  # type: ignore[arg-type]


def test_a_run_without_its_names_needs_keep_known(run_dir: Path) -> None:
    (run_dir / "artifacts" / "names.json").unlink()
    with pytest.raises(UsageError, match=r"names.json: FileNotFoundError.*--keep-known"):
        generate_names(run_dir, 1)
    assert len(generate_names(run_dir, 1, keep_known=True).names) == 1
