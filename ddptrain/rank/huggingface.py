"""Connects Hugging Face's Trainer to a run: checkpoints, logged numbers, progress, preemption and resume."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import IntervalStrategy
except ImportError as error:
    raise ImportError(
        f"ddptrain.HuggingFaceCallback needs transformers and accelerate ({error}): pip install 'ddptrain[huggingface]'"
    ) from error

from ddptrain.rank.checkpoint.files import MODEL_FILE, STATE_FILE

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_STATE = "trainer_state"
_STATE_FILE = "trainer_state.json"  # the Trainer's name of it


class HuggingFaceCallback(TrainerCallback):
    """A callback for transformers.Trainer, to be given to it on every rank.

    It calls `ctx.checkpoint` after each step, or after the evaluation that follows the step, so the `checkpoint`
    section of the configuration says when a checkpoint is saved, and evaluation metrics choose the best one. A run that
    is told to end saves and ends as preempted. What the Trainer logs stands in metrics.jsonl, as rank 0's.

        callback = ddptrain.HuggingFaceCallback(ctx)
        arguments = TrainingArguments(..., save_strategy="no", disable_tqdm=True, report_to=[])
        trainer = Trainer(model=model, args=arguments, ..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_from())

    FSDP, DeepSpeed and models of several parts keep to the Trainer's own checkpoints: this one saves a whole model.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._to_load = ctx.resume_folder is not None
        self._is_training = False
        self._saved_step = -1
        if ctx.device.type == "cuda" and torch.cuda.device_count() <= ctx.local_rank:
            # This rank sees its own GPU only, and accelerate would name it to DDP by the local rank.
            os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")

    def resume_from(self) -> str | None:
        """The folder to give to Trainer.train as resume_from_checkpoint; None where there is nothing to resume.

        Raises:
            ValueError: the checkpoint was not saved by this callback.
        """
        saved = self._ctx.resume_folder
        if saved is None:
            return None
        extra = torch.load(saved / STATE_FILE, map_location="cpu", weights_only=True)["extra"]
        if _STATE not in extra:
            raise ValueError(f"the checkpoint {saved} has no state of a Trainer: it was not saved by this callback")
        self._folder = tempfile.TemporaryDirectory(prefix="ddptrain-resume-")
        folder = Path(self._folder.name)
        (folder / _STATE_FILE).write_text(extra[_STATE], encoding="utf-8")
        (folder / MODEL_FILE).symlink_to(saved.absolute() / MODEL_FILE)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The Trainer has read its state and the weights."""
        self._is_training = True
        if self._folder is not None:
            self._folder.cleanup()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load before the data of an epoch is asked for, which draws a random number."""
        if float(state.epoch or 0).is_integer():
            self._load(parts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load once the batches that were seen before have been passed over."""
        self._load(parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Tell of a step, and save what is due, unless an evaluation follows."""
        self._tell_progress(state)
        if not _evaluates(args, state, control):
            self._save(state, parts, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save what is due, with the metrics of the evaluation."""
        if self._is_training:
            self._save(state, parts, _numbers(parts["metrics"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Tell that an evaluation goes on."""
        self._tell_progress(state)

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Log what the Trainer logs: it is the same on all ranks."""
        numbers = _numbers(parts["logs"])
        if self._ctx.rank == 0 and numbers:
            self._ctx.log(numbers, step=state.global_step, epoch=state.epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step, where another callback has ended the training before its time."""
        self._is_training = False
        if self._saved_step != state.global_step:
            self._save(state, parts, {}, last=True)

    def _load(self, parts: Mapping[str, Any]) -> None:
        if self._to_load:
            self._to_load = False
            self._ctx.resume(**_saved_parts(parts))

    def _save(self, state: Any, parts: Mapping[str, Any], metrics: Mapping[str, float], *, last: bool = False) -> None:
        own: dict[str, Any] = {**_saved_parts(parts), _STATE: json.dumps(dataclasses.asdict(state))}
        saved = self._ctx.checkpoint(
            **own,
            step=state.global_step,
            epoch=state.epoch,
            metrics=metrics,
            last=last or state.global_step >= state.max_steps,
        )
        if saved:
            self._saved_step = state.global_step

    def _tell_progress(self, state: Any) -> None:
        self._ctx.progress(state.global_step, state.max_steps or None, unit="steps")


def _saved_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parts[name] for name in ("model", "optimizer", "lr_scheduler")}


def _evaluates(args: Any, state: Any, control: Any) -> bool:
    """Whether the Trainer evaluates after this step, before the next one."""
    if args.eval_strategy == IntervalStrategy.EPOCH:
        return float(state.epoch).is_integer() and args.eval_delay <= state.epoch
    return bool(control.should_evaluate)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What of the Trainer's values is a number, less the epoch, which is told apart."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
    }
