"""Names of plug-ins: built in, from installed packages, or the user's own. The built-in workloads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Registry:
    """The names of one kind of plug-in: the built-in ones, each with its module:attr, and entry points of a group."""

    built_in: Mapping[str, str]
    group: str

    def installed(self) -> dict[str, str]:
        """Return the entry points of the group in installed packages: name -> module:attr."""
        from importlib.metadata import entry_points

        return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Return all names."""
        return [*self.built_in, *self.installed()]

    def target(self, name: str) -> str | None:
        """Return the module:attr of a name, of which one of the user is its own; None if the name is unknown."""
        if name in self.built_in:
            return self.built_in[name]
        return name if _TARGET.fullmatch(name) else self.installed().get(name)


@dataclass(frozen=True, slots=True)
class DataSource:
    """A parameter that names training data, and the parameter with the options of its store."""

    param: str
    options: str


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in workload: its function and the model of its parameters, both as module:attr.

    params: its module is imported in the driver, so it must not import torch.
    prepare: a function that is called once for a run with (params, folder, tell), in a process of its own, without
        torch. All ranks find what it writes to `folder` in ctx.inputs, in each attempt, also after a resume.
    check: a function with the same arguments that only checks the inputs. It is called if all ranks are on the
        driver's host (others may see other files), unless the param named `input` has the value `own`, which stands
        for data that the workload contains.
    evaluate: a function that is called on all ranks with (ctx, checkpoint); it returns the metrics of the checkpoint.
    held_out: a function as `prepare`, called before an evaluation with {"params", "run", "data"}: it writes the data to
        evaluate on to `folder`, with held_out.json. They are those of the directory `run`, or of the source `data`.
    data: the parameters that name training data.
    """

    target: str
    params: str
    prepare: str = ""
    check: str = ""
    input: str = ""
    own: str = ""
    evaluate: str = ""
    held_out: str = ""
    data: tuple[DataSource, ...] = ()


BUILT_IN = {
    "petnames": BuiltIn(
        "ddptrain.workloads.petnames.train:train",
        "ddptrain.workloads.petnames.params:PetnamesParams",
        check="ddptrain.workloads.petnames.names:check",
        input="names",
        own="builtin",
        evaluate="ddptrain.workloads.petnames.train:evaluate",
        held_out="ddptrain.workloads.petnames.names:prepare",
        data=(DataSource("names", "names_options"),),
    ),
    "images": BuiltIn(
        "ddptrain.workloads.images.train:train",
        "ddptrain.workloads.images.params:ImagesParams",
        "ddptrain.workloads.images.listing:prepare",
        evaluate="ddptrain.workloads.images.train:evaluate",
        held_out="ddptrain.workloads.images.listing:prepare_held_out",
        data=(DataSource("source", "source_options"),),
    ),
}

WORKLOADS = Registry({name: each.target for name, each in BUILT_IN.items()}, "ddptrain.workloads")


def is_built_in(workload: object) -> bool:
    """Return whether the workload is built in, so that it needs no code of the user."""
    return isinstance(workload, str) and workload in BUILT_IN


def workload_target(name: str) -> str:
    """Return the module:attr of the workload's function, without an import. Raises ConfigError if there is none."""
    if (target := WORKLOADS.target(name)) is None:
        raise ConfigError([_unknown(name, WORKLOADS.names())])
    return target


def prepare_target(name: str, params: Mapping[str, object], *, here: bool) -> str:
    """Return the module:attr that prepares or checks the inputs, or "". `here`: all ranks are on this host."""
    if name not in BUILT_IN:
        return ""
    known = BUILT_IN[name]
    is_checked = here and params.get(known.input, known.own) != known.own
    return known.prepare or (known.check if is_checked else "")


def params_model(name: str) -> type[BaseModel] | None:
    """Return the model of a built-in workload's parameters, None for others. Raises ConfigError if there is none."""
    if name not in BUILT_IN:
        workload_target(name)
        return None
    module, _, attribute = BUILT_IN[name].params.partition(":")
    return cast("type[BaseModel]", getattr(import_module(module), attribute))


def check_params(model: type[BaseModel], params: Mapping[str, object]) -> BaseModel:
    """Return the params as their model; in strict mode a list may become a tuple. Raises pydantic's ValidationError."""
    return model.model_validate_json(json.dumps(params), strict=True)


def of_file(name: str) -> str:
    """Return the hint for a workload that names a file, as in src/digits.py:train; "" for others."""
    match = re.fullmatch(r"(?:\./)*([\w/]+)\.py:(\w+)", name)
    return f"did you mean {match[1].replace('/', '.')}:{match[2]}?" if match else ""


def _unknown(name: str, known: list[str]) -> Problem:
    where, message = f'workload "{shorten(name)}"', "is not of the form package.module:function"
    dotted = re.fullmatch(r"([^\W\d]\w*(?:\.\w+)*)\.([^\W\d]\w*)", name)
    if ":" in name:
        hint = of_file(name) or "as in mypackage.training:train"
    elif name.endswith(".py"):
        hint = f"{of_file(f'{name}:train')} A script is workload: {{script: {shorten(name)}}}".strip()
    elif dotted is not None:
        hint = f"did you mean {dotted[1]}:{dotted[2]}?"
    else:
        message, match = "there is no such workload", did_you_mean(name, known)
        match += "" if "known are" in match else f" Known are: {', '.join(sorted(known))}"
        hint = f"{match}; your own is package.module:function"
    return Problem(where, "", message, hint)
