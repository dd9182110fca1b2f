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

from ddptrain.optional_packages import install_command

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import IntervalStrategy
except ImportError as error:
    raise ImportError(
        f"ddptrain.HuggingFaceCallback needs transformers and accelerate ({error}): {install_command('huggingface')}"
    ) from error

from ddptrain.rank.checkpoint.files import STATE_FILE
from ddptrain.rank.checkpoint.weights import MODEL_FILE

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_STATE = "trainer_state"
_PARTS = ("model", "optimizer", "lr_scheduler")
_STATE_FILE = "trainer_state.json"  # the name that the Trainer expects


class HuggingFaceCallback(TrainerCallback):
    """A callback for transformers.Trainer. Pass it to the Trainer on every rank.

    It calls `ctx.checkpoint` after each step, or after the evaluation that follows the step, so the `checkpoint`
    section of the configuration determines when a checkpoint is saved, and evaluation metrics choose the best one.
    After a preemption notice the run saves a checkpoint and ends as preempted. Rank 0 writes what the Trainer logs to
    metrics.jsonl.

        callback = ddptrain.HuggingFaceCallback(ctx)
        arguments = TrainingArguments(..., save_strategy="no", disable_tqdm=True, report_to=[])
        trainer = Trainer(model=model, args=arguments, ..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_from())

    With FSDP, DeepSpeed and sharded models, use the Trainer's own checkpoints: this callback saves complete models.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._to_load = ctx.resume_folder is not None
        self._is_training = False
        self._saved_step = -1
        if ctx.device.type == "cuda" and torch.cuda.device_count() <= ctx.local_rank:
            # This rank sees only one GPU, but accelerate would pass the local rank to DDP as the device index.
            os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")

    def resume_from(self) -> str | None:
        """Return the folder for Trainer.train(resume_from_checkpoint=...); None if there is no checkpoint.

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
        """Delete the folder of resume_from(), because the Trainer has read the state and the weights."""
        self._is_training = True
        if self._folder is not None:
            self._folder.cleanup()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Resume before the epoch's data loader is created, because this draws a random number."""
        if float(state.epoch or 0).is_integer():
            self._load(parts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Resume in the middle of an epoch, after the Trainer has skipped the batches that were used before."""
        self._load(parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Report progress, and save a checkpoint if one is due and no evaluation follows."""
        self._report_progress(state)
        if not _evaluates(args, state, control):
            self._save(state, parts, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save a checkpoint if one is due, with the metrics of the evaluation."""
        if self._is_training:
            self._save(state, parts, _numbers(parts["metrics"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Report progress during an evaluation, so that the driver does not report a hang."""
        self._report_progress(state)

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Log what the Trainer logs, on rank 0 only, because it is the same on all ranks."""
        numbers = _numbers(parts["logs"])
        if self._ctx.rank == 0 and numbers:
            self._ctx.log(numbers, step=state.global_step, epoch=state.epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step if another callback has stopped the training early."""
        self._is_training = False
        if self._saved_step != state.global_step:
            self._save(state, parts, {}, last=True)

    def _load(self, parts: Mapping[str, Any]) -> None:
        if self._to_load:
            self._to_load = False
            self._ctx.resume(**{name: parts[name] for name in _PARTS})

    def _save(self, state: Any, parts: Mapping[str, Any], metrics: Mapping[str, float], *, last: bool = False) -> None:
        objects: dict[str, Any] = {name: parts[name] for name in _PARTS}
        objects[_STATE] = json.dumps(dataclasses.asdict(state))
        saved = self._ctx.checkpoint(
            **objects,
            step=state.global_step,
            epoch=state.epoch,
            metrics=metrics,
            last=last or state.global_step >= state.max_steps,
        )
        if saved:
            self._saved_step = state.global_step

    def _report_progress(self, state: Any) -> None:
        self._ctx.progress(state.global_step, state.max_steps or None, unit="steps")


def _evaluates(args: Any, state: Any, control: Any) -> bool:
    """Return whether the Trainer evaluates between this step and the next one."""
    if args.eval_strategy == IntervalStrategy.EPOCH:
        return float(state.epoch).is_integer() and args.eval_delay <= state.epoch
    return bool(control.should_evaluate)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the Trainer's values, without the epoch, which ctx.log takes separately."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
    }
