"""The `tracking` section: the trackers that get metrics besides the run directory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ddptrain.config.plugin_names import Registry
from ddptrain.config.rank_settings import TrackerSpec
from ddptrain.config.types import FilledText, Seconds, Strict, off_word, wrong_field
from ddptrain.config.wording import describe_value, did_you_mean, nearest, shorten
from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command

_FINISH_TIMEOUT_S = 30.0
_FINISH_TIMEOUT = "Seconds that it may take at the end of the run, which waits no longer."


# The class of a tracker, which only ranks import.
TRACKERS = Registry(
    {
        "wandb": "ddptrain.tracking.wandb:WandbTracker",
        "tensorboard": "ddptrain.tracking.tensorboard:TensorBoardTracker",
    },
    "ddptrain.trackers",
)
# Tracker -> the extra that has its package; the package of others, which has the name of the tracker, is always there.
TRACKER_EXTRAS = {"tensorboard": "tensorboard"}

_MODES = ("off", "rank0", "process", "shared")
_WANDB_MODES = ("offline", "online", "disabled")


def _wandb_mode(value: object) -> object:
    """As `off_word`. Raises an error with the right place for a mode of the wandb library, also for a misspelt one."""
    if (
        isinstance(value, str)
        and value not in _MODES
        and (meant := nearest(value, (*_MODES, *_WANDB_MODES))) in _WANDB_MODES
    ):
        hint = f"write mode: rank0, and env: {{WANDB_MODE: {meant}}}; mode says which ranks log"
        raise wrong_field(
            "", f"expected off, rank0, process or shared, got {describe_value(value)}, a WANDB_MODE", hint
        )
    return off_word(value)


def _section(value: object) -> object:
    """Convert a section that is true (its defaults) or false (off)."""
    return {"mode": "rank0" if value else "off"} if isinstance(value, bool) else value


def _tracker_name(name: str) -> str:
    if name in TRACKERS.built_in:
        raise wrong_field("", f"has a section of its own, tracking.{name}", f"write tracking.{name}.mode")
    if TRACKERS.target(name) is None:
        hint = did_you_mean(name, TRACKERS.names()) + " Your own is package.module:Class."
        raise wrong_field("", f"there is no such tracker, got {describe_value(name)}", hint)
    return name


_WandbMode = Annotated[
    Literal["off", "rank0", "process", "shared"],
    BeforeValidator(_wandb_mode),
    Field(json_schema_extra={"enum": ["off", "rank0", "process", "shared", False]}),
]
_Mode = Annotated[
    Literal["off", "rank0", "process"],
    BeforeValidator(off_word),
    Field(json_schema_extra={"enum": ["off", "rank0", "process", False]}),
]


class WandbSettings(Strict):
    """Weights & Biases. The key comes from WANDB_API_KEY or ~/.netrc; without one it records offline."""

    mode: _WandbMode = Field(
        default="rank0",
        description="Which ranks log: rank0 alone, each into its own run (process), or all into one run (shared).",
    )
    project: FilledText | None = Field(default=None, description="The project; by default the run's name.")
    entity: FilledText | None = Field(default=None, description="User or team; by default that of the key.")
    tags: list[FilledText] = Field(default_factory=list, description="Tags of the run.")
    group: FilledText | None = Field(
        default=None, description="Group of the run; by default the run id in mode process, and the id of a sweep."
    )
    log_every: int = Field(default=10, ge=1, description="Steps between two rows of numbers.")
    checkpoints: bool = Field(default=False, description="Whether checkpoints are logged as artifacts.")
    finish_timeout_s: Seconds = Field(default=_FINISH_TIMEOUT_S, gt=0, description=_FINISH_TIMEOUT)


class TensorBoardSettings(Strict):
    """Event files for TensorBoard, in tracking/tensorboard of the run directory."""

    mode: _Mode = Field(
        default="rank0", description="Which ranks write: rank0 alone, or each into a folder of its own (process)."
    )


class OtherTracker(Strict):
    """A tracker of another package, or of your own."""

    name: Annotated[str, Field(min_length=1), AfterValidator(_tracker_name)] = Field(
        description="Its name among the entry points of the group ddptrain.trackers, or package.module:Class."
    )
    mode: _Mode = Field(default="process", description="Which ranks use it: rank0 alone, or each (process).")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of its class.", repr=False)
    finish_timeout_s: Seconds = Field(default=_FINISH_TIMEOUT_S, gt=0, description=_FINISH_TIMEOUT)


class TrackingConfig(Strict):
    """Trackers, which get metrics besides the run directory. They never delay or end the training."""

    wandb: Annotated[WandbSettings, BeforeValidator(_section)] = Field(
        default=WandbSettings(mode="off"), description="Weights & Biases; off unless the section is there."
    )
    tensorboard: Annotated[TensorBoardSettings, BeforeValidator(_section)] = Field(
        default=TensorBoardSettings(mode="off"), description="TensorBoard; off unless the section is there."
    )
    other: list[OtherTracker] = Field(default_factory=list, description="Further trackers.")

    @property
    def is_on(self) -> bool:
        """Whether any rank has a tracker."""
        return bool(self.for_rank(0))

    def for_rank(self, rank: int) -> list[TrackerSpec]:
        """Return the trackers of a rank. The driver sets their field `from_driver`."""
        sections = {name: getattr(self, name) for name in TRACKERS.built_in}
        modes = [
            *(
                (name, section.mode, section.model_dump(), getattr(section, "finish_timeout_s", _FINISH_TIMEOUT_S))
                for name, section in sections.items()
            ),
            *((each.name, each.mode, dict(each.options), each.finish_timeout_s) for each in self.other),
        ]
        return [
            TrackerSpec(name, options, timeout_s)
            for name, mode, options, timeout_s in modes
            if mode != "off" and (rank == 0 or mode != "rank0")
        ]


def tracker_target(name: str) -> str:
    """Return the module:attr of a tracker's class. Raises UsageError if no installed package has that name."""
    if target := TRACKERS.target(name):
        return target
    raise UsageError(
        f"there is no tracker {shorten(name)}: no package that is installed here has an entry point of that name in "
        f"the group {TRACKERS.group}"
    )


def install_tracker(name: str) -> str:
    """Return the pip command for the package of a tracker."""
    return install_command(TRACKER_EXTRAS[name]) if name in TRACKER_EXTRAS else f"pip install {name}"
