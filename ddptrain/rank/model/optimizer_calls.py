"""ctx.backward and ctx.step: the optional part of a rank's context that takes the steps of optimizers."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

from ddptrain.protocol import events
from ddptrain.rank.steps.timed_activities import TimedActivities
from ddptrain.rank.trackers import RankTrackers

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.data.dataloader import RankLoader
    from ddptrain.rank.model.gradient_steps import GradientSteps


class OptimizerCalls(TimedActivities):
    """Gradient accumulation and the gradient scaler of fp16, for loops that call ctx.backward and ctx.step."""

    device: torch.device
    _tracked: RankTrackers
    _loaders: list[RankLoader]

    @cached_property
    def _gradients(self) -> GradientSteps:
        from ddptrain.rank.model.gradient_steps import GradientSteps

        def is_last_batch() -> bool:
            return any(loader.is_at_last_batch for loader in self._loaders)

        steps = GradientSteps(self.device, is_last_batch=is_last_batch)
        steps.use(self._spec.prepare.get("precision", "fp32"), self._spec.prepare.get("accumulate", 1))
        return steps

    @property
    def accumulate(self) -> int:
        """The number of batches per step of the optimizer, from ctx.prepare or the configuration."""
        return self._gradients.accumulate

    def backward(self, loss: torch.Tensor) -> None:
        """Call `loss.backward()`, with the loss scale of fp16. `loss` is the mean over this rank's batch.

        Raises:
            RuntimeError: optimizer.zero_grad() was called before all batches of a step were accumulated.
        """
        self._gradients.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None, last: bool = False) -> bool:
        """Count a batch, after its `backward`; return whether the optimizer took a step, so that the weights have
        changed.

        With `accumulate` the optimizer takes a step with every N-th batch and with the last batch of an epoch. Its
        gradient is the mean over these batches, also if the last step of an epoch has fewer than N; then the gradients
        are set to zero. ctx.loader detects the last batch; with any other loader pass last=True for it, on all ranks.
        `clip` is the largest norm of the gradient. With fp16 a step with infinite gradients is skipped, and logged as
        train/skipped_steps and train/loss_scale.

            ctx.backward(loss)
            if ctx.step(optimizer, clip=1.0):
                scheduler.step()

        Raises:
            FloatingPointError: the gradients were infinite or NaN in 100 steps in a row.
        """
        steps = self._gradients
        skipped = steps.skipped
        taken = steps.step(optimizer, clip, last=last)
        if steps.skipped > skipped and self.rank == 0:
            values = {"train/skipped_steps": float(steps.skipped), "train/loss_scale": steps.scale}
            event = events.Metrics(time.time_ns(), values, None, None)
            self._emitter.emit(event)
            self._tracked.numbers(event)
        return taken
