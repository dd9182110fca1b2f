import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.petnames.names import load_names, split_names
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.train import NameDataset
from tests.unit.workloads.petnames_ranks import run_ranks

# The limit is that of the three ranks that all tests look at, also on a machine with other work.
pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("petnames_ranks.py")
WINDOW, FULL, TINY, STRAIGHT, FIRST_PART, RESUMED, STOPPED, GOES_ON = range(8)
WORLD_SIZES = (1, 3)


def cases(names: str, few_names: str) -> list[dict[str, Any]]:
    small = {"names": names, "hidden_size": 8, "layers": 2, "dropout": 0.0, "val_fraction": 0.2, "learning_rate": 0.01}
    window = {**small, "context": "window", "batch_size": 20, "epochs": 2}
    full = {**small, "context": "full", "batch_size": 4, "epochs": 2, "grad_clip": 1.0}
    tiny = {**full, "names": few_names, "batch_size": 1, "val_fraction": 0.0}
    straight = {
        **full,
        "dropout": 0.3,
        "output_dropout": 0.3,
        "epochs": 3,
        "input": "embedding",
    }
    return [
        {"params": window},
        {"params": full},
        {"params": tiny},
        {"params": straight},
        {"params": {**straight, "epochs": 2}},
        {"params": straight, "resume_from": f"case-{FIRST_PART}/checkpoint"},
        {"params": straight, "stop_after": 7},
        {"params": straight, "resume_from": f"case-{STOPPED}/checkpoint"},
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, run by real gloo groups of 1 and 3 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    some = load_names(PetnamesParams()).names[::60]
    (root / "names.txt").write_text("\n".join(some))
    (root / "few.txt").write_text("\n".join(some[:4]))
    (root / "cases.json").write_text(json.dumps(cases(str(root / "names.txt"), str(root / "few.txt"))))
    run_ranks(SCRIPT, root, WORLD_SIZES)
    return root


def ranks_of(runs: Path, world_size: int, case: int) -> list[dict[str, Any]]:
    folder = runs / f"world-{world_size}" / f"case-{case}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def weights_of(runs: Path, world_size: int, case: int) -> dict[str, torch.Tensor]:
    return load_file(runs / f"world-{world_size}" / f"case-{case}" / "checkpoint" / "model.safetensors")


def row_count(runs: Path, case: int) -> int:
    params = json.loads((runs / "cases.json").read_text())[case]["params"]
    train = split_names(load_names(PetnamesParams(names=params["names"])).names, params["val_fraction"], 0).train
    return len(NameDataset(train, params["context"], 8))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(runs: Path, world_size: int) -> None:
    straight, resumed = weights_of(runs, world_size, STRAIGHT), weights_of(runs, world_size, RESUMED)
    for name, weight in straight.items():
        torch.testing.assert_close(weight, resumed[name], atol=1e-6, rtol=1e-5)
    assert [entry["epoch"] for entry in ranks_of(runs, world_size, RESUMED)[0]["logged"]] == [3]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_that_stopped_in_mid_epoch_goes_on_exactly_where_it_was(runs: Path, world_size: int) -> None:
    """Bit-equal weights and validation losses, dropout included, and each step once."""
    stopped, went_on = ranks_of(runs, world_size, STOPPED), ranks_of(runs, world_size, GOES_ON)
    straight, resumed = weights_of(runs, world_size, STRAIGHT), weights_of(runs, world_size, GOES_ON)
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())
    for rank, whole in enumerate(ranks_of(runs, world_size, STRAIGHT)):
        assert len({done for done, *_ in stopped[rank]["progressed"]}) == 7
        assert stopped[rank]["progressed"] + went_on[rank]["progressed"] == whole["progressed"]
        assert losses(stopped[rank]) + losses(went_on[rank]) == losses(whole)


def losses(rank: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(entry["values"]["val/loss"], entry["step"], entry["epoch"]) for entry in rank["logged"]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [WINDOW, FULL])
def test_val_loss_is_the_mean_over_every_symbol_of_the_held_out_names(runs: Path, world_size: int, case: int) -> None:
    params = json.loads((runs / "cases.json").read_text())[case]["params"]
    held_out = split_names(load_names(PetnamesParams(names=params["names"])).names, params["val_fraction"], 0).held_out
    state = torch.load(runs / f"world-{world_size}/case-{case}/checkpoint/state.pt", weights_only=True)
    model = CharacterModel(ModelConfig.restored(state["extra"]["model_config"])).eval()
    model.load_state_dict(weights_of(runs, world_size, case))
    names = NameDataset(held_out, params["context"], 8)
    symbols, lengths, targets = names.batch(torch.arange(len(names)))
    assert len(targets) == sum(len(name) + 1 for name in held_out)
    expected = cross_entropy(model(symbols, lengths), targets).item()
    assert state["metrics"]["val/loss"] == pytest.approx(expected, rel=1e-5)


def test_every_rank_logs_the_losses_of_all(runs: Path) -> None:
    first, second, third = (losses(rank) for rank in ranks_of(runs, 3, FULL))
    assert first == second == third and [epoch for *_, epoch in first] == [1, 2]


def test_progress_ends_at_the_total(runs: Path) -> None:
    for rank in ranks_of(runs, 3, FULL):
        done, total, unit = rank["progressed"][-1]
        assert (done, unit) == (total, "names")


def test_names_are_saved_for_generate_with_the_held_out_apart(runs: Path) -> None:
    saved = json.loads((runs / "world-3" / f"case-{FULL}" / "names.json").read_text())
    assert set(saved["train"]).isdisjoint(saved["held_out"])
    assert len(saved["train"]) == row_count(runs, FULL)
