"""The `system` section: how often the use of hosts, ranks and GPUs is measured; and the policy for slow ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ddptrain.config.types import Seconds, Strict, wrong_field

Slow = Literal["off", "warn", "replace"]


def off_word(value: object) -> object:
    """Convert false, which is `off` in YAML 1.1, to the word."""
    return "off" if value is False else value


_SHORTEST_S = 0.2


def _interval(seconds: float) -> float:
    if 0 < seconds < _SHORTEST_S:
        raise wrong_field("", f"is {seconds:g} s: measuring that often costs too much", f"write {_SHORTEST_S} or more")
    return seconds


class SystemConfig(Strict):
    """Measurements of hosts, ranks and GPUs, in system.jsonl of the run directory."""

    every_s: Annotated[Seconds, Field(ge=0), AfterValidator(_interval)] | None = Field(
        default=5.0, description="Seconds between two measurements; 0 or null for none."
    )
