"""The sections that `ddptrain retrain` reads: retrain, data, notify, models. `train` and `sweep` read notify only."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ddptrain.config.types import NAME_PATTERN, Duration, FilledText, Strict, wrong_field

FROM_ENV = "env:"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict) else value


Positive = Annotated[Duration, Field(gt=0)]


class GateRule(Strict):
    """A condition that a new version must fulfil before it becomes the champion."""

    metric: FilledText = Field(description="A metric of the evaluation, as val/loss.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether the lowest or the highest value is best.")
    at_most: float | None = Field(default=None, description="The largest value that passes; null for no limit.")
    at_least: float | None = Field(default=None, description="The smallest value that passes; null for no limit.")
    better_by: float = Field(
        default=0.0,
        description="The smallest improvement over the champion: 0 accepts an equal value, a negative number "
        "accepts a slightly worse one.",
    )
    against: Literal["champion", "none"] = Field(
        default="champion", description="What the value is compared with; none checks only at_most and at_least."
    )

    @model_validator(mode="after")
    def _limits_in_order(self) -> Self:
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise wrong_field(
                "at_least", f"is {self.at_least:g}, above at_most, which is {self.at_most:g}", "swap them"
            )
        return self


class RetrainConfig(Strict):
    """Unattended retraining of a model of the registry."""

    model: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        description="The model whose versions it creates: lower-case letters, digits, dots, dashes and underscores."
    )
    overlap: Literal["skip", "wait", "replace"] = Field(
        default="skip",
        description="What to do if this model is being retrained already, on any host: skip this start, wait for the "
        "end, or replace the other one (its run is stopped and saves first).",
    )
    wait: Duration = Field(
        default=3600.0, ge=0, description='The longest time that overlap: wait and replace wait, as "1h".'
    )
    if_unchanged: Literal["skip", "train"] | None = Field(
        default=None,
        description="What to do if data, params and code are those of the current version. Default: skip; train if "
        "the data cannot be seen, because the workload is a function or a script and data.sources is empty.",
    )
    deadline: Positive | None = Field(
        default=None,
        description='Time that one start may take, with all restarts, as "6h"; then it saves and ends, and the next '
        "start continues. Waiting for another retraining does not count.",
    )
    gate: Annotated[list[GateRule], BeforeValidator(_as_list, json_schema_input_type=GateRule | list[GateRule])] = (
        Field(
            default_factory=lambda: [GateRule(metric="val/loss")],
            description="Conditions that a new version must fulfil to become the champion: one, or a list. By default "
            "at least as good as the champion in checkpoint.metric.",
        )
    )
    keep: int = Field(
        default=10,
        ge=2,
        description="The newest versions of the model that the cleanup keeps, with twice as many runs of this name "
        "that succeeded and half as many others. Versions with an alias and their runs always stay.",
    )


class DataConfig(Strict):
    """The training data, as the data check of `ddptrain retrain` sees them."""

    sources: list[FilledText] = Field(
        default_factory=list,
        description="Files, folders or URLs (s3://bucket/folder) that a function or a script reads; built-in workloads "
        "name theirs in params.",
    )


# The URLs of notify may contain tokens: no error shows them.
def _apprise_url(text: str) -> str:
    return _checked_url(text, r"[A-Za-z][\w+.-]*://", "is not an Apprise URL", "write it as mailto://..., or env:NAME")


def _web_url(text: str) -> str:
    return _checked_url(text, r"https?://[^/\s]", "is not a web server's URL", "write it as https://..., or env:NAME")


def _checked_url(text: str, pattern: str, message: str, hint: str) -> str:
    if text.startswith(FROM_ENV):
        if not re.fullmatch(r"[A-Za-z_]\w*", text.removeprefix(FROM_ENV), re.ASCII):
            raise wrong_field("", "contains no variable name after env:", "write it as env:SLACK_URL")
    elif not re.match(pattern, text) or re.search(r"[\x00-\x1f\x7f]", text):
        raise wrong_field("", message, hint)
    return text


def _as_url_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Event = Literal["failed", "rejected", "recovered", "hang", "promoted", "finished", "always"]


class NotifyConfig(Strict):
    """Who is notified of runs, sweeps and retrainings, and of alerts of ranks."""

    urls: Annotated[
        list[Annotated[str, AfterValidator(_apprise_url)]],
        BeforeValidator(_as_url_list, json_schema_input_type=str | list[str]),
    ] = Field(
        default_factory=list,
        description="Apprise URLs (Slack, e-mail, Teams, ntfy, webhooks, ...); env:NAME takes it from a variable.",
        repr=False,
    )
    on: list[Event] = Field(
        default=["failed", "rejected", "recovered", "hang"],
        description="Events that are reported, besides alerts of ranks. A model's state that lasts is reported once; "
        "finished reports each end with success, always each end.",
    )
    heartbeat: Annotated[str, AfterValidator(_web_url)] | None = Field(
        default=None,
        description="URL of a check at healthchecks.io or a server like it; env:NAME takes it from a variable.",
        repr=False,
    )

    @property
    def literal_urls(self) -> list[str]:
        """The URLs that the file contains itself; they may contain tokens, so they are recorded nowhere."""
        given = [*self.urls, *([self.heartbeat] if self.heartbeat else [])]
        return [url for url in given if not url.startswith(FROM_ENV)]


class ModelsConfig(Strict):
    """The model registry."""

    dir: FilledText = Field(default="models", description="Folder of the models, or s3://bucket/folder.")
