import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file
from ddptrain.workloads.images.model import SavedConfig, build, load_model
from tests.unit.workloads.images_runs import COLOURS, description, make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose best checkpoint, step-3, is not its latest one."""
    return make_run(
        tmp_path / "run",
        description(),
        *[(step, loss, build(description())) for step, loss in [(3, 0.5), (6, 0.9)]],
    )


def test_the_best_checkpoint_goes_before_the_latest(run_dir: Path) -> None:
    assert load_model(run_dir).checkpoint == "step-3"
    (run_dir / "checkpoints" / "best").unlink()
    assert load_model(run_dir).checkpoint == "step-6"


def test_the_model_is_what_was_saved_and_ready_to_predict(tmp_path: Path) -> None:
    model = build(description())
    model.train()
    model(torch.randn(4, 3, 16, 16))  # BatchNorm has means now
    saved = load_model(make_run(tmp_path / "run", description(), (3, 0.5, model)))
    images = torch.randn(2, 3, 16, 16)
    assert not saved.model.training
    assert torch.equal(saved.model(images), model.eval()(images))
    assert saved.names == tuple(COLOURS)


def test_outputs_without_a_class_have_the_names_of_the_labels(tmp_path: Path) -> None:
    config = description(n_outputs=4, outputs=[2, 0, 3], output_names=["leaf, grass", "other", "sky", "rose"])
    saved = load_model(make_run(tmp_path / "run", config, (3, 0.5, build(config))))
    assert saved.names == ("green", "other", "blue", "red")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "resnet5000"}, "there is no model 'resnet5000' here"),
        ({"n_outputs": 4}, "4 outputs have 3 names"),
        ({"image_size": 10**6}, "image_size: Input should be less than"),
        ({"outputs": [0, 1]}, "each class needs an output of its own"),
        ({"outputs": [0, 1, 1]}, "each class needs an output of its own"),
        ({"outputs": [0, 1, 3]}, "an output of a class is not one of the 3"),
        ({"outputs": [0, 1, -1]}, "an output of a class is not one of the 3"),
        ({"options": {"weights": "DEFAULT"}}, "options.weights"),
        ({"architecture": "vit_b_16", "options": {"num_layers": 4096}}, "options.num_layers"),
        ({"architecture": "maxvit_t", "options": {"input_size": [64] * 1000}}, "options.input_size"),
    ],
)
def test_a_description_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        SavedConfig.restored(description() | changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("stored", [None, [], "resnet50", {}, {"architecture": "small_cnn"}])
def test_anything_else_than_a_description_is_refused(stored: Any) -> None:
    with pytest.raises(UsageError, match="the checkpoint does not contain an image classifier"):
        SavedConfig.restored(stored)


def test_what_training_describes_is_accepted() -> None:
    from ddptrain.workloads.images.model import describe

    for architecture in ("small_cnn", "resnet18", "vit_b_16", "maxvit_t", "googlenet"):
        assert SavedConfig.restored(describe(architecture, 224, ["a", "b"])).architecture == architecture


def test_a_run_of_another_workload_is_refused(run_dir: Path) -> None:
    (run_dir / "run.json").write_text('{"workload": "petnames"}')
    with pytest.raises(UsageError, match="is a run of the workload 'petnames'; predict needs one of images"):
        load_model(run_dir)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run has no checkpoint yet"):
        load_model(make_run(tmp_path / "run", description()))


def describe_as_it_is(file: Path) -> None:
    """Make the manifest of a checkpoint say what a file of it is now, as somebody who has changed it can."""
    manifest = file.with_name("checkpoint.json")
    told = json.loads(manifest.read_text())
    size_bytes, digest = hash_file(file)
    for each in told["files"]:
        if each["name"] == file.name:
            each.update(size_bytes=size_bytes, sha256=digest)
    manifest.write_text(json.dumps(told))


@pytest.mark.parametrize("file_name", ["model.safetensors", "state.pt"])
def test_a_damaged_checkpoint_is_named(run_dir: Path, file_name: str) -> None:
    path = run_dir / "checkpoints" / "step-3" / file_name
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UsageError, match=rf"the checkpoint .*step-3 is damaged: {file_name} has 50 bytes, not "):
        load_model(run_dir)
    describe_as_it_is(path)
    with pytest.raises(UsageError, match=r"can't read the checkpoint .*step-3"):
        load_model(run_dir)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    other = build(description(n_outputs=5))
    with pytest.raises(UsageError, match=r"can't read the checkpoint .*size mismatch for head.weight"):
        load_model(make_run(tmp_path / "run", description(), (3, 0.5, other)))


class _Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_checkpoint_is_not_executed(run_dir: Path, tmp_path: Path) -> None:
    state = run_dir / "checkpoints" / "step-3" / "state.pt"
    torch.save({"extra": {"model_config": _Evil(tmp_path / "executed")}}, state)
    describe_as_it_is(state)
    with pytest.raises(UsageError, match="can't read the checkpoint"):
        load_model(run_dir)
    state.write_bytes(pickle.dumps(_Evil(tmp_path / "executed")))
    describe_as_it_is(state)
    with pytest.raises(UsageError, match="can't read the checkpoint"):
        load_model(run_dir)
    assert not (tmp_path / "executed").exists()
