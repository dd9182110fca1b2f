"""Torchrun's command line and its PET_* variables: what each option means for `ddptrain run`."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddptrain.cli.parser import OPTIONAL_NUMBER, with_number
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.config.sections.clusters import ClusterConfig

_NNODES, _PER_NODE = "--nnodes", "--nproc-per-node"
# Option -> the field of the configuration with its value; for texts, which are not YAML, see _TEXTS.
_FIELDS = {
    "--max-restarts": "failure.max_restarts",
    "--shutdown-timeout": "failure.grace_s",
    "--log-dir": "results.dir",
    "--role": "env.ROLE_NAME",
    "--virtual-local-rank": "env.LOCAL_RANK",
}
_TEXTS = ("--log-dir", "--role")
_STREAMS = ("--redirects", "--tee")
_SHORT = {"-r": "--redirects", "-t": "--tee"}
_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}  # what ddptrain handles, too
# With --cluster they say that the launch is one of torchrun's: the number of ranks of a host is 1 if it is not given.
_RENDEZVOUS = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--master-addr")
_IGNORED = (
    *(*_RENDEZVOUS, "--master-port", "--local-addr", "--monitor-interval", "--start-method", "--event-log-handler"),
    *("--log-line-prefix-template", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--logs-specs"),
    "--numa-binding",
)
_FLAGS = ("--standalone", "--no-python", "--run-path", "--virtual-local-rank")
_REFUSED = {"--print-completion": "it prints torchrun's completion; that of ddptrain: ddptrain --install-completion"}
_OTHERS = (_NNODES, _PER_NODE, "--signals-to-handle", "--local-ranks-filter")
_VALUES = {*_OTHERS, *_FIELDS, *_STREAMS, *_IGNORED, *_REFUSED} - set(_FLAGS)


@dataclass(frozen=True, slots=True)
class Given:
    """An option that was given. typed: as on the command line, or as a variable (then `by_variable`)."""

    value: str
    typed: str
    by_variable: bool


@dataclass(frozen=True, slots=True)
class TorchrunOptions:
    """The options of torchrun that were given, by name. words: the words of the command line that they are."""

    given: Mapping[str, Given]
    words: tuple[str, ...] = ()

    def on(self, flag: str) -> bool:
        """Return whether a flag is given."""
        return flag in self.given

    def _value(self, name: str) -> str:
        return self.given[name].value if name in self.given else ""

    def ignored(self, *, ranks: bool, runs_dir: bool) -> list[str]:
        """Return what is ignored, as it was typed; `ranks`, `runs_dir`: whether ddptrain's own options are given."""
        signals = {word.strip().upper() for word in self._value("--signals-to-handle").split(",")} - {""}
        names = [
            *(name for name in _IGNORED if self.on(name)),
            *(name for name in (_NNODES, _PER_NODE) if ranks and self._value(name) not in ("", "1")),
            *(["--log-dir"] if runs_dir and self.on("--log-dir") else []),
            *(["--signals-to-handle"] if not signals <= _SIGNALS else []),
            *(
                name for name in _STREAMS if self._value(name)[1:] or self._value(name) in ("1", "2")
            ),  # one log has both
        ]
        return [re.split(r"[= ]", self.given[name].typed, maxsplit=1)[0] for name in names]

    def fields(self, own: Container[str], changed: Container[str]) -> dict[str, str]:
        """Return the fields, `--set` text -> the option as it was typed, except those that are set otherwise.

        own: the fields of ddptrain's own options. changed: those of --set, before which an option has precedence.
        """
        fields: dict[str, str] = {}
        for name, field in _FIELDS.items():
            given = self.given.get(name)
            if given is None or field in own or (given.by_variable and field in changed):
                continue
            value = '"0"' if name in _FLAGS else json.dumps(given.value) if name in _TEXTS else given.value
            fields[f"{field}={value}"] = given.typed
        return fields

    def ranks(self, cluster: ClusterConfig) -> tuple[dict[str, str], str]:
        """Return the fields for the number of ranks, as `fields` does, and a notice, or "". Raises UsageError."""
        per_node, nodes = self.given.get(_PER_NODE), self.given.get(_NNODES)
        if per_node is None and not (cluster.is_embedded or {"--standalone", _NNODES, *_RENDEZVOUS} & set(self.given)):
            return {}, ""  # all slots of the cluster
        least, most = _hosts(nodes)
        if nodes and cluster.is_embedded and least > 1:
            raise UsageError(
                f"{nodes.typed}: this machine is one host, and one command starts the ranks of all hosts: name their "
                "cluster with --cluster (ddptrain cluster up --help), or leave it out"
            )
        typed = " ".join(each.typed for each in (nodes, per_node) if each) or "torchrun's default of one rank per host"
        word = per_node.value if per_node else "1"
        if word in ("auto", "cpu", "gpu"):
            return dict.fromkeys(_counted(word, cluster, typed), typed), ""
        if per_node and not re.fullmatch(r"[0-9]{1,6}", word):
            raise UsageError(f"{per_node.typed}: expected a number, auto, cpu or gpu")
        number = int(word)
        if cluster.is_embedded or most == 1:
            return {f"cluster.ranks={number}": typed}, "" if per_node else _unused(cluster)
        notice = "on the free slots of the cluster, so a host may get another number of them"
        if least < most:
            fewest, total = least * number, most * number
            return {f"cluster.ranks={{min: {fewest}, max: {total}}}": typed}, f"{typed}: up to {total} ranks {notice}"
        return {f"cluster.ranks={most * number}": typed}, f"{typed}: {most * number} ranks {notice}"

    @property
    def typed_ranks(self) -> str:
        """The option --nproc-per-node as it was typed on the command line, or ""."""
        per_node = self.given.get(_PER_NODE)
        return per_node.typed if per_node and not per_node.by_variable else ""

    def shown(self) -> Callable[[int], bool] | None:
        """Return what says whether the output of a local rank is shown; None: all is. Raises UsageError."""
        for name in _STREAMS:
            if not re.fullmatch(r"|[0-3]|\d+:[0-3](,\d+:[0-3])*", self._value(name)):
                raise UsageError(f"{self.given[name].typed}: expected 0 or 3 (all output)")
        if self._value("--redirects") == "3" and self._value("--tee") in ("", "0"):
            return lambda local_rank: False
        if (chosen := self.given.get("--local-ranks-filter")) is None:
            return None
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", chosen.value):
            raise UsageError(f"{chosen.typed}: expected numbers of local ranks, as 0,1")
        ranks = {int(word) for word in chosen.value.split(",")}
        return lambda local_rank: local_rank in ranks


def read(words: Sequence[str], environ: Mapping[str, str], own: Mapping[str, str]) -> tuple[TorchrunOptions, list[str]]:
    """Take the options of torchrun out of the words of a command line, up to the script; return the other words.

    own: ddptrain's own options, and what each takes, "" for nothing. Raises UsageError for a missing value, and for an
    option without any meaning here.
    """
    given = dict(_variables(environ))
    taken: list[str] = []
    rest: list[str] = []
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        if not word.startswith("-") or word in ("-", "--"):
            rest += [word, *waiting]
            break
        name, equals, value = _split(word, own)
        if name not in _VALUES and name not in _FLAGS:
            takes = own.get(name, "") if not equals else ""
            rest.append(with_number(word, waiting) if takes == OPTIONAL_NUMBER else word)
            if takes not in ("", OPTIONAL_NUMBER) and waiting:
                rest.append(waiting.popleft())
            continue
        following = [waiting.popleft()] if name not in _FLAGS and not equals and waiting else []
        typed = " ".join([word, *following])
        if name in _FLAGS and equals:
            raise UsageError(f"{typed} has a value, which it does not take")
        if name not in _FLAGS and not (equals or following):
            raise UsageError(f"{typed} needs a value")
        if name in _REFUSED:
            raise UsageError(f"{typed} is not available: {_REFUSED[name]}")
        given[name] = Given(following[0] if following else value, typed, by_variable=False)
        taken += [word, *following]
    return TorchrunOptions(given, tuple(taken)), rest


def program(script: str, args: Sequence[str], options: TorchrunOptions, *, module: bool) -> dict[str, Any]:
    """Return the configuration of the program: its workload, and a name unless the workload implies it.

    Raises UsageError.
    """
    if options.on("--no-python") and not options.on("--run-path"):
        if module:
            raise UsageError("--no-python runs a program, and --module a Python module: leave one of them out")
        from pathlib import PurePath

        from ddptrain.config.types import slug

        workload: dict[str, Any] = {"module": "ddptrain.rank.program", "args": [script, *args]}
        return {"workload": workload, "name": slug(PurePath(script).stem) or "run"}
    return {"workload": {"module" if module and not options.on("--run-path") else "script": script, "args": list(args)}}


def _split(word: str, own: Container[str]) -> tuple[str, bool, str]:
    """Return the name of an option, whether a value comes with it, and this value.

    In torchrun's names `_` is `-`, and they may be abbreviated.
    """
    if word[:2] in _SHORT:
        return _SHORT[word[:2]], len(word) > 2, word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    matches = [option for option in (*_VALUES, *_FLAGS) if option.startswith(dashed)]
    if dashed not in matches and (name in own or len(matches) != 1):
        return name, bool(equals), value
    return dashed if dashed in matches else matches[0], bool(equals), value


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Given]]:
    flags = (*_FLAGS, "--module")  # on the command line it is an option of ddptrain's own
    for name in (*_VALUES, *flags):
        variable = f"PET_{name[2:].replace('-', '_').upper()}"
        if name == "--shutdown-timeout" and not environ.get(variable):
            variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        value = environ.get(variable, "")
        if name in flags and value and not re.fullmatch(r"[0-9]+", value):
            raise UsageError(f"{variable}={value}: expected 0 or 1")
        if value and (name not in flags or int(value)) and name not in _REFUSED:
            yield name, Given(value, f"{variable}={value}", by_variable=True)


def _hosts(nodes: Given | None) -> tuple[int, int]:
    if nodes is None:
        return 1, 1
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", nodes.value)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise UsageError(f"{nodes.typed}: expected a number of hosts, or MIN:MAX")
    return int(found[1]), int(found[2] or found[1])


def _counted(word: str, cluster: ClusterConfig, typed: str) -> list[str]:
    """Return the fields for as many ranks as a host has cores or GPUs. Raises UsageError, ClusterError."""
    from ddptrain.gpus import usable_cores, visible_gpus

    if not cluster.is_embedded:
        return ["cluster.ranks=auto"]  # all slots
    if word == "cpu":
        return [f"cluster.ranks={usable_cores()}", "cluster.gpus=0"]
    if cluster.gpus != 0 and visible_gpus(os.environ):
        return ["cluster.ranks=auto"]
    if word == "gpu":
        raise UsageError(f"{typed}: this machine has no GPU that this process may use")
    return [f"cluster.ranks={usable_cores()}"]


def _unused(cluster: ClusterConfig) -> str:
    """Return how to use all GPUs of this machine, where one rank starts because no number is given; or ""."""
    from ddptrain.gpus import visible_gpus

    count = len(visible_gpus(os.environ)) if cluster.is_embedded and cluster.gpus != 0 else 0
    if count < 2:
        return ""
    return f"one rank, as torchrun starts, on one of {count} GPUs: --nproc-per-node gpu starts one on each"
