import pytest
import torch

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.data import make_rows
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig, summed_nll
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.train import learning_rate_factor

CPU = torch.device("cpu")


def small_model(**params: object) -> CharacterModel:
    torch.manual_seed(0)
    return CharacterModel(ModelConfig.of(PetnamesParams.model_validate({"hidden_size": 8, "dropout": 0.0, **params})))


def test_the_default_model_is_the_tutorials() -> None:
    model = CharacterModel(ModelConfig.of(PetnamesParams()))
    lstm = model.lstm
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.dropout, lstm.batch_first) == (
        31,
        128,
        4,
        0.1,
        True,
    )
    assert model.linear.out_features == 31


def test_default_training_is_the_tutorials() -> None:
    params = PetnamesParams()
    assert (params.context, params.window, params.epochs, params.batch_size) == ("window", 8, 25, 16384)
    assert (params.learning_rate, params.lr_schedule, params.weight_decay, params.grad_clip) == (1e-3, "constant", 0, 0)


@pytest.mark.parametrize("entry", ["one_hot", "embedding"])
def test_padding_changes_neither_the_loss_of_a_name_nor_of_its_neighbour(entry: str) -> None:
    model = small_model(context="full", input=entry)
    rows = make_rows(["ada", "mr. whiskers"], "full", 8, CPU)
    together = summed_nll(*scored(model, rows.batch(torch.tensor([0, 1]))))
    apart = sum(summed_nll(*scored(model, rows.batch(torch.tensor([i])))) for i in range(2))
    torch.testing.assert_close(together, apart)


def scored(model: CharacterModel, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]), batch[1]


def test_one_layer_with_dropout_gives_no_warning() -> None:
    assert small_model(layers=1, dropout=0.5).lstm.dropout == 0.0


def test_a_model_is_built_again_from_what_a_checkpoint_stores() -> None:
    config = small_model(context="full").config
    assert ModelConfig.restored(config.plain()) == config


@pytest.mark.parametrize("stored", [None, {}, {"hidden": 3}])
def test_a_checkpoint_of_something_else_is_refused(stored: object) -> None:
    with pytest.raises(UsageError, match="does not contain a pet-name model"):
        ModelConfig.restored(stored)


@pytest.mark.parametrize("change", [{"layers": 10**9}, {"hidden_size": 10**9}, {"context": "all"}, {"window": "8"}])
def test_a_checkpoint_of_a_model_that_cannot_be_trained_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        ModelConfig.restored({**small_model().config.plain(), **change})


def test_a_model_takes_no_memory_before_its_weights_fit() -> None:
    largest = {**small_model().config.plain(), "layers": 32, "hidden_size": 8192}
    assert all(each.is_meta for each in CharacterModel.restored(largest).parameters())


def test_a_model_over_other_symbols_is_refused() -> None:
    with pytest.raises(UsageError, match="over the symbols 'abc'"):
        ModelConfig.restored({**small_model().config.plain(), "symbols": "abc"})


def test_every_parameter_is_described() -> None:
    assert all(field.description for field in PetnamesParams.model_fields.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochz": 3},
        {"epochs": 0},
        {"epochs": "3"},
        {"val_fraction": 1.0},
        {"context": "half"},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="PetnamesParams"):
        PetnamesParams.model_validate(wrong)


def test_one_cycle_rises_to_the_highest_rate_and_falls_to_nothing() -> None:
    factors = [learning_rate_factor("one_cycle", step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.04)
    assert factors[30] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.0)
    assert factors[:31] == sorted(factors[:31]) and factors[30:] == sorted(factors[30:], reverse=True)


def test_the_other_schedules_fall_or_stay() -> None:
    assert [learning_rate_factor("cosine", step, 2) for step in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert {learning_rate_factor("constant", step, 5) for step in range(5)} == {1.0}
