"""The scores of `ddptrain evaluate`, with known values: of names, of images, and of the classes that models share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddptrain.errors import UsageError
from ddptrain.rank.evaluation import SavedCheckpoint
from ddptrain.workloads.images import train as evaluate_checkpoint
from ddptrain.workloads.images.data import BadImages, Batch, TooManyBadImages
from ddptrain.workloads.images.model import ModelInput
from ddptrain.workloads.images.train import validate
from ddptrain.workloads.petnames import train as names_training
from ddptrain.workloads.petnames.generate import sample_names
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.petnames.names import STOP_ID
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.train import NameDataset
from tests.unit.workloads.images_runs import description, make_manifest, make_run, model_of_colours, picture
from tests.unit.workloads.test_petnames_generate import save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Context(SimpleNamespace):
    """What an evaluation uses of a rank's context."""

    def __init__(self, inputs: Path | None) -> None:
        super().__init__(inputs=inputs, device=CPU, rank=0, world_size=1, progressed=[])

    def progress(self, done: float, *, unit: str) -> None:
        self.progressed.append((done, unit))

    def mean(self, value: float, weight: float) -> float:
        return value


def saved(path: Path, **fields: Any) -> SavedCheckpoint:
    return SavedCheckpoint("a", path, 1, 1.0, {}, **fields)


# --- Names ---


def half_stops(**params: Any) -> CharacterModel:
    """It gives every name an end with a probability of 1/2, and each of the other 30 symbols 1/60."""
    model = CharacterModel(ModelConfig.of(PetnamesParams(hidden_size=4, layers=1, **params)))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.linear.bias.data[STOP_ID] = math.log(30)
    return model.eval()


@pytest.mark.parametrize("params", [{"context": "full"}, {"window": 3}])
def test_names_are_scored_for_each_character_and_stop(
    params: Any, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_training, "_VALIDATION_ROWS", 1)
    folder = save_checkpoint(tmp_path, half_stops(**params))
    (tmp_path / "names.json").write_text(json.dumps(["ada", "bo"]))
    ctx: Any = Context(tmp_path)
    scores = names_training.evaluate(ctx, saved(folder))
    assert scores == {"val/loss": pytest.approx(3.1225739, rel=1e-6)}  # 5 ln 60 + 2 ln 2, of 7
    n_rows = 2 if params == {"context": "full"} else 7
    assert ctx.progressed == [(number, "batches") for number in range(1, n_rows + 1)]
    with pytest.raises(UsageError, match="no names to evaluate on"):
        names_training.evaluate(Context(None), saved(folder))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"context": "full"}, {"window": 2}])
def test_names_are_drawn_from_the_probabilities_of_the_model(params: Any) -> None:
    draw = torch.Generator().manual_seed(4)
    names = sample_names(half_stops(**params), 400, "b.", 1.0, draw)
    assert 0.4 < names.count("b.") / 400 < 0.6 and all(name and name.startswith("b.") for name in names)
    colder = sample_names(half_stops(**params), 400, "b.", 0.5, draw)
    assert colder.count("b.") > 380  # 900 : 30
    assert "" not in sample_names(half_stops(**params), 400, "", 1.0, draw)
    assert set(sample_names(half_stops(**params), 100, "abc", 1.0, draw, 3)) == {"abc", None}


@pytest.mark.parametrize(
    ("rank", "world_size", "mean", "count"),
    [
        (0, 1, 2.960612, 9),  # (6 ln 60 + 3 ln 2) / 9
        (0, 2, 1.973741 * 9 / 6, 6),  # "c" and "ada", the shortest and the longest: 4 ln 60 + 2 ln 2
        (1, 2, 0.986871 * 9 / 3, 3),  # "bo": 2 ln 60 + ln 2
        (3, 4, 0.0, 0),
    ],
)
def test_each_rank_scores_every_nth_name_by_length(rank: int, world_size: int, mean: float, count: int) -> None:
    given: list[Any] = []
    ctx: Any = SimpleNamespace(rank=rank, world_size=world_size, device=CPU, mean=lambda *of: given.append(of))
    model = half_stops(context="full", output_dropout=0.9).train()  # which must be off
    seen: list[int] = []
    names_training.mean_loss(ctx, model, NameDataset(["ada", "bo", "c"], "full", 8), lambda: seen.append(1))
    assert given == [(pytest.approx(mean, rel=1e-5), count)]
    assert len(seen) == (count > 0) and model.training


# --- Images ---


def batch(logits: list[list[float]], labels: list[int]) -> Batch:
    """A batch whose "images" are the scores that the model gives them."""
    index = torch.arange(10, 10 + len(labels))
    return Batch(torch.tensor(logits), torch.tensor(labels, dtype=torch.int64), index, {})


def no_bad() -> BadImages:
    return BadImages(cast("Any", SimpleNamespace(train=(0,), val=(1,), keys=["0", "1"])), 1.0)


class AsTheyAre(ModelInput):
    """Leaves the images of a batch as they are."""

    def __init__(self, outputs: list[int]) -> None:
        super().__init__({"mean": [0.0], "std": [1.0], "outputs": outputs}, CPU)

    def __call__(self, images: Tensor) -> Tensor:
        return images


class Scores(nn.Module):
    """Returns its input, in eval mode only."""

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        return images


def test_score_is_over_the_images_of_all_batches(group: None) -> None:
    first = batch([[0, 0, 3, 0, 0, 0, 0], [1, 0, 2, 3, 4, 5, 6]], [0, 1])
    nothing = Batch(torch.zeros(0, 7), torch.zeros(0).long(), torch.zeros(0).long(), {0: "gone"})
    second = batch([[2, 0, 6, 7, 1, 5, 3]], [1])
    bad = no_bad()
    kept: list[tuple[Tensor, Tensor]] = []
    seen: list[int] = []
    metrics = validate(
        Scores(),
        AsTheyAre([2, 0]),
        [first, nothing, second],
        bad,
        cast("Any", SimpleNamespace(validated=lambda batch, logits: kept.append((batch.index, logits)))),
        lambda: seen.append(1),
    )
    assert len(seen) == 3 and bad.reasons == {0: "gone"}
    assert metrics == {
        "val/loss": pytest.approx(3.715165, rel=1e-6),  # (0.261380 + 5.457763 + 5.426351) / 3
        "val/accuracy": pytest.approx(1 / 3),
        "val/top5": pytest.approx(2 / 3),  # the right outputs are the first, the sixth and the fifth
    }
    assert [index.tolist() for index, _ in kept] == [[10, 11], [10]] and kept[1][1].tolist() == second.images.tolist()


@pytest.mark.parametrize("is_training", [True, False])
def test_score_of_no_images_is_no_number_and_the_model_keeps_its_mode(group: None, is_training: bool) -> None:
    model = Scores().train(is_training)
    metrics = validate(model, AsTheyAre([0, 1]), [], no_bad())
    assert all(math.isnan(value) for value in metrics.values()) and len(metrics) == 3
    assert model.training is is_training


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model tells three colours apart; one whose model knows two of them; and images to evaluate on."""
    root = tmp_path_factory.mktemp("colours")
    torch.manual_seed(0)
    model = model_of_colours(description())
    make_run(root / "three", description(), (1, 0.5, model))
    two = description(classes=["blue", "red"], outputs=[0, 2])
    make_run(root / "two", two, (1, 0.5, model))
    other = description(classes=["cat", "dog"], outputs=[0, 2])
    make_run(root / "other", other, (1, 0.5, model))
    keys = []
    for name, count in (("blue", 2), ("green", 1), ("red", 2)):
        (root / "images" / name).mkdir(parents=True)
        for number in range(count):
            (root / "images" / name / f"{number}.png").write_bytes(picture(name))
            keys.append(f"{name}/{number}.png")
    (root / "inputs").mkdir()
    make_manifest(str(root / "images"), ("blue", "green", "red"), keys).write(root / "inputs")
    return root


def evaluated(root: Path, run: str, *compared: str, **params: Any) -> tuple[dict[str, float], list[str], Any]:
    """The scores of the model of a run, its notes, and the context."""
    ctx: Any = Context(root / "inputs")
    checkpoint = saved(
        root / run / "checkpoints" / "step-1",
        params={"source": "/elsewhere", "loader_workers": 0, "batch_size": 2, **params},
        data=str(root / "images"),
        compared={name: root / name / "checkpoints" / "step-1" for name in compared},
    )
    return evaluate_checkpoint.evaluate(ctx, checkpoint), checkpoint.notes, ctx


def test_images_of_another_source_are_scored(group: None, colours: Path) -> None:
    scores, notes, ctx = evaluated(colours, "three", "three")
    assert scores["val/accuracy"] == scores["val/top5"] == 1.0 and 0 < scores["val/loss"] < 0.3
    assert notes == [] and ctx.progressed == [(1, "batches"), (2, "batches"), (3, "batches")]


def test_images_of_classes_that_not_all_models_know_are_left_out(group: None, colours: Path) -> None:
    for run in ("two", "three"):
        scores, notes, ctx = evaluated(colours, run, "three", "two", "other", "gone")
        assert scores["val/accuracy"] == 1.0 and len(ctx.progressed) == 2
        assert notes == ["1 image of 5 are left out, because not all models know their classes: green"]


def test_model_of_other_classes_is_an_error(group: None, colours: Path) -> None:
    with pytest.raises(UsageError, match="it knows none of the classes of the images to evaluate on: blue, green, red"):
        evaluated(colours, "other", "three", "other")
    with pytest.raises(UsageError, match="no images to evaluate on: start an evaluation"):
        evaluate_checkpoint.evaluate(Context(None), saved(colours))  # type: ignore[arg-type]


def test_images_that_could_not_be_read_are_noted(group: None, colours: Path) -> None:
    path = colours / "images" / "red" / "1.png"
    data = path.read_bytes()
    path.write_bytes(b"no image")
    try:
        scores, notes, _ = evaluated(colours, "three", max_bad_fraction=0.2)
        assert scores["val/accuracy"] == 1.0 and notes == ["1 of 5 images could not be read"]
        with pytest.raises(TooManyBadImages):
            evaluated(colours, "three", max_bad_fraction=0.19)
    finally:
        path.write_bytes(data)
