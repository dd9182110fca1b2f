"""Workloads and cluster backends by name: the built-in ones, those of installed packages, and the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ddptrain.config.wording import did_you_mean, shown
from ddptrain.errors import ConfigError, Problem, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

ENTRY_POINT_GROUP = "ddptrain.workloads"
BACKEND_GROUP = "ddptrain.clusters"
TRACKER_GROUP = "ddptrain.trackers"
CONTEXT_NAMES = frozenset({"ctx", "context", ""})  # of a function's first parameter, less underscores around them
CONTEXT_TYPE = "RankContext"
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where a built-in workload's function and the model of its parameters are, both as module:attr.

    The module of the model must not import torch: it is loaded in the driver, before anything starts. Nor must that of
    `prepare`, which the driver has called once for a run, in a process of its own, with (params, folder, tell): what it
    puts into the folder all ranks find in ctx.inputs, in each attempt, after a resume as well. `check` is the same for
    a workload that only looks whether its inputs do, which ranks elsewhere may see otherwise: it is called where all
    ranks are on the driver's host, unless the param `input` is `own`, which is the workload's own and good.
    """

    target: str
    params: str
    prepare: str = ""
    check: str = ""
    input: str = ""
    own: str = ""


BUILT_IN = {
    "petnames": BuiltIn(
        "ddptrain.workloads.petnames.train:train",
        "ddptrain.workloads.petnames.params:PetnamesParams",
        check="ddptrain.workloads.petnames.names:check",
        input="names",
        own="builtin",
    ),
    "images": BuiltIn(
        "ddptrain.workloads.images.train:train",
        "ddptrain.workloads.images.params:ImagesParams",
        "ddptrain.workloads.images.data.listing:prepare",
    ),
}

# Cluster backend -> its provider, which starts clusters that outlive the command; "" where there is nothing to start.
BACKENDS = {
    "local": "ddptrain.clusters.backends.local:LocalProvider",
    "address": "",
    "ssh": "ddptrain.clusters.backends.ssh:SshProvider",
    "slurm": "ddptrain.clusters.backends.slurm:SlurmProvider",
    "saturn": "ddptrain.clusters.backends.saturn:SaturnProvider",
    "kubernetes": "ddptrain.clusters.backends.kubernetes.provider:KubernetesProvider",
    "class": "ddptrain.clusters.backends.dask_class:DeployProvider",
}

# Tracker -> its class, which only ranks import.
TRACKERS = {
    "wandb": "ddptrain.tracking.wandb.sink:WandbTracker",
    "tensorboard": "ddptrain.tracking.tensorboard:TensorBoardTracker",
}
# Tracker -> what to install where its package, which has the tracker's name, is missing.
TRACKER_PACKAGES = {"wandb": "wandb", "tensorboard": "ddptrain[tensorboard]"}


def is_built_in(workload: object) -> bool:
    """Whether a configuration's workload is one of ours, which needs no code of the user's."""
    return isinstance(workload, str) and workload in BUILT_IN


def workload_target(name: str) -> str:
    """The module:attr of the workload's function, which is not imported.

    Raises: ConfigError where no workload has that name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name].target
    if _TARGET.fullmatch(name):
        return name
    installed = _installed(ENTRY_POINT_GROUP)
    if name in installed:
        return installed[name]
    raise ConfigError([_unknown(name, [*BUILT_IN, *installed])])


def prepare_target(name: str, params: Mapping[str, object], *, here: bool) -> str:
    """The module:attr of what prepares or checks a workload's inputs; "" where there is nothing to do.

    `here` says whether all ranks are on this host.
    """
    if name not in BUILT_IN:
        return ""
    known = BUILT_IN[name]
    is_checked = here and params.get(known.input, known.own) != known.own
    return known.prepare or (known.check if is_checked else "")


def takes_context(name: str, annotation: str) -> bool:
    """Whether a function's first parameter, with its annotation as text, is for the context."""
    kind = annotation.strip("'\"").partition("|")[0].strip().rpartition(".")[2]
    return name.strip("_") in CONTEXT_NAMES or kind == CONTEXT_TYPE


def params_model(name: str) -> type[BaseModel] | None:
    """The model of the workload's parameters, or None where it has none and takes whatever it is given.

    Raises: ConfigError where no workload has that name.
    """
    if name not in BUILT_IN:
        workload_target(name)
        return None
    from importlib import import_module

    module, _, attribute = BUILT_IN[name].params.partition(":")
    return cast("type[BaseModel]", getattr(import_module(module), attribute))


def backends() -> list[str]:
    """Names of all cluster backends, those of installed packages included."""
    return [*BACKENDS, *_installed(BACKEND_GROUP)]


def provider_class(name: str) -> type[Any]:
    """The class that starts clusters of a backend (`clusters.protocol.Provider`), imported.

    Raises: UsageError where the backend starts none, or can't be imported.
    """
    from importlib import import_module

    target = BACKENDS[name] if name in BACKENDS else _installed(BACKEND_GROUP)[name]
    if not target:
        raise UsageError(f"cluster.backend {name} uses a cluster that is up: there is nothing to start or to end")
    module, _, attribute = target.partition(":")
    try:
        return cast("type[Any]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cluster.backend {name} ({target}) can't be used: {error}") from error


def trackers() -> list[str]:
    """Names of all trackers, those of installed packages included."""
    return [*TRACKERS, *_installed(TRACKER_GROUP)]


def known_tracker(name: str) -> bool:
    """Whether this names a tracker, as far as can be told without importing anything."""
    return _TARGET.fullmatch(name) is not None or name in trackers()


def tracker_target(name: str) -> str:
    """The module:attr of a tracker's class. Raises UsageError for a name that no installed package has."""
    if name in TRACKERS:
        return TRACKERS[name]
    if _TARGET.fullmatch(name):
        return name
    installed = _installed(TRACKER_GROUP)
    if name in installed:
        return installed[name]
    raise UsageError(
        f"there is no tracker {shown(name)}: no package that is installed here has an entry point of that name in "
        f"the group {TRACKER_GROUP}"
    )


def _installed(group: str) -> dict[str, str]:
    """What installed packages offer in a group of entry points: name -> module:attr."""
    from importlib.metadata import entry_points

    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=group)}


def _unknown(name: str, known: list[str]) -> Problem:
    where = f'workload "{shown(name)}"'
    if ":" in name:
        return Problem(where, "", "is not of the form package.module:function", "as in mypackage.training:train")
    hint = did_you_mean(name, known)
    if "known are" not in hint:
        hint += f" Known are: {', '.join(sorted(known))}"
    return Problem(where, "", "there is no such workload", f"{hint}; your own is package.module:function")
