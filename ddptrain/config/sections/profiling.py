"""The `profile` section: the steps and ranks that torch.profiler records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from ddptrain.config.types import Strict, wrong_field
from ddptrain.protocol.rank_spec import MOST_PROFILED_STEPS, StepProfile

if TYPE_CHECKING:
    from ddptrain.config.sections.clusters import ClusterConfig


class ProfileConfig(Strict):
    """Which steps of which ranks torch.profiler records, as {steps: [10, 13], ranks: [0]}."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] = Field(
        description=f"The first and the last step, counted from 1; at most {MOST_PROFILED_STEPS} steps."
    )
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        default=None, description="The ranks, counted from 0; null is every rank."
    )

    @property
    def spec(self) -> StepProfile:
        """The same for a rank."""
        return StepProfile(self.steps[0], self.steps[1], tuple(self.ranks or ()))

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if problem := self.spec.problem:
            raise wrong_field("steps", *problem)
        return self


def check_profiled_ranks(profile: ProfileConfig | None, cluster: ClusterConfig) -> None:
    """Raises a validation error if the run can never have one of the profiled ranks."""
    ranks = cluster.ranks
    if profile is None or profile.ranks is None or ranks == "auto":
        return
    most = ranks if isinstance(ranks, int) else ranks.max
    if (highest := max(profile.ranks)) >= most:
        hint = f"write ranks from 0 to {most - 1}" if most > 1 else "write [0]"
        raise wrong_field("profile.ranks", f"has {highest}, but the run has at most {most} ranks", hint)
