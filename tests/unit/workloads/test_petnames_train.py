import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddptrain.workloads.petnames.data import make_rows
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig, summed_nll
from ddptrain.workloads.petnames.names import load_names, split_names
from ddptrain.workloads.petnames.params import PetnamesParams
from tests.unit.workloads.petnames_ranks import run_ranks

# The limit is that of the three ranks that all tests look at, also on a machine with other work.
pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("petnames_ranks.py")
WINDOW, FULL, TINY, STRAIGHT, FIRST_PART, RESUMED, STOPPED, GOES_ON = range(8)
WORLD_SIZES = (1, 2, 3)


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
    """Every case, run by real gloo groups of 1, 2 and 3 ranks."""
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
    return len(make_rows(train, params["context"], 8, torch.device("cpu")))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [WINDOW, FULL, TINY])
def test_all_ranks_together_take_every_row_exactly_once_an_epoch(runs: Path, world_size: int, case: int) -> None:
    expected = sorted([*range(row_count(runs, case))] * 2)  # two epochs
    taken = [row for rank in ranks_of(runs, world_size, case) for row in itertools.chain(*rank["rows"])]
    assert sorted(taken) == expected


@pytest.mark.parametrize("case", [WINDOW, FULL, TINY])
def test_rows_do_not_divide_evenly_in_the_cases_tried(runs: Path, case: int) -> None:
    assert any(row_count(runs, case) % world_size for world_size in WORLD_SIZES)


def test_a_rank_without_rows_in_a_step_still_takes_the_step(runs: Path) -> None:
    ranks = ranks_of(runs, 3, TINY)
    assert {len(rank["progressed"]) for rank in ranks} == {4}  # 2 steps, 2 epochs
    assert min(sum(map(len, rank["rows"])) for rank in ranks) == 0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [WINDOW, FULL])
def test_gradients_do_not_depend_on_the_number_of_ranks(runs: Path, world_size: int, case: int) -> None:
    """One process that takes the same steps with whole batches ends up with the same weights."""
    params = json.loads((runs / "cases.json").read_text())[case]["params"]
    reference = retrained(params, world_size)
    for name, weight in weights_of(runs, world_size, case).items():
        torch.testing.assert_close(weight, reference[name], atol=2e-4, rtol=2e-3)


def retrained(params: dict[str, Any], world_size: int) -> dict[str, torch.Tensor]:
    """The plain loop: one process, whole global batches, the mean over their targets."""
    from ddptrain.workloads.petnames.data import plan_epoch

    settings = PetnamesParams(**params)
    train = split_names(load_names(settings).names, settings.val_fraction, 0).train
    rows = make_rows(train, settings.context, settings.window, torch.device("cpu"))
    torch.manual_seed(0)
    model = CharacterModel(ModelConfig.of(settings))
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    for epoch in range(1, settings.epochs + 1):
        plans = [plan_epoch(rows, settings.batch_size, world_size, rank, 0, epoch) for rank in range(world_size)]
        for shares in zip(*plans, strict=True):
            inputs, targets = rows.batch(torch.cat([share.index for share in shares]))
            optimizer.zero_grad()
            (summed_nll(model(inputs), targets) / shares[0].total).backward()
            if settings.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(runs: Path, world_size: int) -> None:
    straight, resumed = weights_of(runs, world_size, STRAIGHT), weights_of(runs, world_size, RESUMED)
    for name, weight in straight.items():
        torch.testing.assert_close(weight, resumed[name], atol=1e-6, rtol=1e-5)
    assert [entry["epoch"] for entry in ranks_of(runs, world_size, RESUMED)[0]["logged"]] == [3, 3]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_that_stopped_in_mid_epoch_goes_on_exactly_where_it_was(runs: Path, world_size: int) -> None:
    """Bit-equal weights and losses, dropout and all, and every row once an epoch."""
    stopped, went_on = ranks_of(runs, world_size, STOPPED), ranks_of(runs, world_size, GOES_ON)
    straight, resumed = weights_of(runs, world_size, STRAIGHT), weights_of(runs, world_size, GOES_ON)
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())
    for rank, whole in enumerate(ranks_of(runs, world_size, STRAIGHT)):
        assert len({done for done, *_ in stopped[rank]["progressed"]}) == 7
        assert stopped[rank]["rows"] + went_on[rank]["rows"] == whole["rows"]
        assert stopped[rank]["progressed"] + went_on[rank]["progressed"] == whole["progressed"]
        assert losses(stopped[rank]) + losses(went_on[rank]) == losses(whole)


def losses(rank: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What was logged, but for the rates."""
    kept = [(entry["values"].get("train/loss"), entry["values"].get("val/loss")) for entry in rank["logged"]]
    return [(*values, entry["step"], entry["epoch"]) for values, entry in zip(kept, rank["logged"], strict=True)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [WINDOW, FULL])
def test_val_loss_is_the_mean_over_every_symbol_of_the_held_out_names(runs: Path, world_size: int, case: int) -> None:
    params = json.loads((runs / "cases.json").read_text())[case]["params"]
    held_out = split_names(load_names(PetnamesParams(names=params["names"])).names, params["val_fraction"], 0).held_out
    state = torch.load(runs / f"world-{world_size}/case-{case}/checkpoint/state.pt", weights_only=True)
    model = CharacterModel(ModelConfig.restored(state["extra"]["model_config"])).eval()
    model.load_state_dict(weights_of(runs, world_size, case))
    rows = make_rows(held_out, params["context"], 8, torch.device("cpu"))
    inputs, targets = rows.batch(torch.arange(len(rows)))
    expected = summed_nll(model(inputs), targets).item() / sum(len(name) + 1 for name in held_out)
    assert state["metrics"]["val/loss"] == pytest.approx(expected, rel=1e-5)


def test_every_rank_logs_its_train_loss_and_rank_0_the_val_loss(runs: Path) -> None:
    first, second = ranks_of(runs, 2, FULL)
    assert [sorted(entry["values"]) for entry in second["logged"]] == [["samples", "samples_per_s", "train/loss"]] * 2
    assert [list(entry["values"]) for entry in first["logged"]][1::2] == [["val/loss"]] * 2
    assert [entry["epoch"] for entry in second["logged"]] == [1, 2]


def test_validation_reports_the_progress_again_as_a_sign_of_life(runs: Path) -> None:
    for rank in ranks_of(runs, 2, STRAIGHT):
        progressed = [done for done, *_ in rank["progressed"]]
        validated = sum("val/loss" in entry["values"] for entry in ranks_of(runs, 2, STRAIGHT)[0]["logged"])
        assert len(progressed) - len({*progressed}) >= validated > 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dropout_of_each_rank_and_epoch_has_a_seed_of_its_own(runs: Path, world_size: int) -> None:
    for rank, seen in enumerate(ranks_of(runs, world_size, STRAIGHT)):
        assert sorted(seen["seeds"]) == sorted(hash((0, epoch, rank)) % 2**64 for epoch in (1, 2, 3))


def test_progress_ends_at_the_total(runs: Path) -> None:
    for rank in ranks_of(runs, 3, FULL):
        done, total, unit = rank["progressed"][-1]
        assert (done, unit) == (total, "names")


def test_names_are_saved_for_generate_with_the_held_out_apart(runs: Path) -> None:
    saved = json.loads((runs / "world-2" / f"case-{FULL}" / "names.json").read_text())
    assert set(saved["train"]).isdisjoint(saved["held_out"])
    assert len(saved["train"]) == row_count(runs, FULL)
