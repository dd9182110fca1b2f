"""The callback for transformers.Trainer: what it passes to the rank's context, and when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers.trainer_utils import IntervalStrategy

from ddptrain.rank.checkpoint.files import STATE_FILE
from ddptrain.rank.checkpoint.weights import MODEL_FILE
from ddptrain.rank.huggingface import HuggingFaceCallback

PARTS = {"model": "M", "optimizer": "O", "lr_scheduler": "L"}


@dataclass
class State:
    """What the callback reads of the Trainer's state."""

    global_step: int = 0
    max_steps: int = 10
    epoch: float | None = 0.0


class Context:
    """Notes what it is called with; a checkpoint is due at even steps."""

    def __init__(self, rank: int = 0, resume_folder: Path | None = None) -> None:
        self.rank = self.local_rank = rank
        self.device = torch.device("cpu")
        self.resume_folder = resume_folder
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def checkpoint(self, **given: Any) -> bool:
        self.calls.append(("checkpoint", given))
        return bool(given["step"] % 2 == 0)

    def resume(self, **given: Any) -> None:
        self.calls.append(("resume", given))

    def log(self, numbers: Any, **given: Any) -> None:
        self.calls.append(("log", {"numbers": numbers, **given}))

    def progress(self, done: float, total: float | None, *, unit: str) -> None:
        self.calls.append(("progress", {"done": done, "total": total, "unit": unit}))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [given for call, given in self.calls if call == name]


def callback_of(ctx: Context) -> HuggingFaceCallback:
    return HuggingFaceCallback(cast(Any, ctx))


def arguments(strategy: IntervalStrategy = IntervalStrategy.NO, delay: float = 0) -> Any:
    return SimpleNamespace(eval_strategy=strategy, eval_delay=delay)


CONTROL = SimpleNamespace(should_evaluate=False)


def test_step_is_reported_and_offered_as_a_checkpoint_with_the_trainers_state() -> None:
    ctx = Context()
    callback_of(ctx).on_step_end(arguments(), State(4, 10, 0.4), CONTROL, **PARTS, tokenizer="unused")
    assert ctx.named("progress") == [{"done": 4, "total": 10, "unit": "steps"}]
    (saved,) = ctx.named("checkpoint")
    assert json.loads(saved.pop("trainer_state")) == {"global_step": 4, "max_steps": 10, "epoch": 0.4}
    assert saved == {**PARTS, "step": 4, "epoch": 0.4, "metrics": {}, "last": False}


def test_last_step_is_marked_and_saved_once() -> None:
    ctx = Context()
    callback = callback_of(ctx)
    callback.on_step_end(arguments(), State(10, 10, 1.0), CONTROL, **PARTS)
    callback.on_train_end(arguments(), State(10, 10, 1.0), CONTROL, **PARTS)
    assert [(given["step"], given["last"]) for given in ctx.named("checkpoint")] == [(10, True)]


@pytest.mark.parametrize(("rank", "logs"), [(0, 1), (1, 0)])
def test_numbers_are_logged_by_rank_0_alone(rank: int, logs: int) -> None:
    ctx = Context(rank)
    callback = callback_of(ctx)
    values = {"loss": 1, "grad_norm": 0.5, "epoch": 0.1, "done": True, "text": "x"}
    callback.on_log(arguments(), State(2, epoch=0.1), CONTROL, logs=values)
    callback.on_log(arguments(), State(2, epoch=0.1), CONTROL, logs={"epoch": 0.1})
    assert ctx.named("log") == [{"numbers": {"loss": 1.0, "grad_norm": 0.5}, "step": 2, "epoch": 0.1}] * logs


def test_resume_happens_once_before_the_data_of_an_epoch_or_after_skipped_batches(tmp_path: Path) -> None:
    whole, half = Context(resume_folder=tmp_path), Context(resume_folder=tmp_path)
    callback = callback_of(whole)
    callback.on_epoch_begin(arguments(), State(epoch=1.0), CONTROL, **PARTS)
    callback.on_step_begin(arguments(), State(epoch=1.0), CONTROL, **PARTS)
    assert whole.named("resume") == [PARTS]
    callback = callback_of(half)
    callback.on_epoch_begin(arguments(), State(epoch=0.5), CONTROL, **PARTS)
    assert half.calls == []
    callback.on_step_begin(arguments(), State(epoch=0.5), CONTROL, **PARTS)
    assert half.named("resume") == [PARTS]


def test_folder_to_resume_from_has_the_trainers_state_and_the_weights_until_training_begins(tmp_path: Path) -> None:
    torch.save({"extra": {"trainer_state": '{"global_step": 4}'}}, tmp_path / STATE_FILE)
    (tmp_path / MODEL_FILE).write_bytes(b"weights")
    callback = callback_of(Context(resume_folder=tmp_path))
    folder = Path(str(callback.resume_from()))
    assert json.loads((folder / "trainer_state.json").read_text()) == {"global_step": 4}
    assert (folder / MODEL_FILE).read_bytes() == b"weights"
    callback.on_train_begin(arguments(), State(), CONTROL)
    assert not folder.exists()


def test_checkpoint_of_other_code_is_refused(tmp_path: Path) -> None:
    torch.save({"extra": {}}, tmp_path / STATE_FILE)
    with pytest.raises(ValueError, match="has no state of a Trainer: it was not saved by this callback"):
        callback_of(Context(resume_folder=tmp_path)).resume_from()
    assert callback_of(Context()).resume_from() is None
