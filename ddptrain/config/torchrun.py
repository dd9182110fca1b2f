"""Torchrun's command line: what takes the place of its options, and its translation into a configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddptrain.errors import UsageError

if TYPE_CHECKING:
    import argparse

_CLUSTER = "the hosts and the rendezvous are those of the cluster"
_LOGS = "the log of each rank is shown and saved"
# Options of torchrun, and what takes their place; `_` and `-` are the same in them.
REPLACEMENTS = {
    "--nproc-per-node": "use --ranks N, the number of all ranks",
    "--nnodes": "use --ranks N, the number of all ranks, and --cluster NAME for several hosts",
    "--max-restarts": "use --set failure.max_restarts=N",
    "--log-dir": "use --runs-dir DIR: each run has the log of each rank in its directory",
    "--no-python": "the script must be a Python file, or with -m a module",
    **dict.fromkeys(("--tee", "--redirects"), f"leave it out: {_LOGS}"),
    **dict.fromkeys(
        ("--standalone", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--monitor-interval"),
        f"leave it out: {_CLUSTER}",
    ),
}
_UNUSED = "ddptrain has nothing like it"
# Options with a value that a configuration does not need, and the reason.
_LEFT_OUT = {
    "--log-dir": "each run has the log of each rank in its directory",
    **dict.fromkeys(("--tee", "--redirects"), _LOGS),
    **dict.fromkeys(
        (
            *("--node-rank", "--master-addr", "--master-port", "--local-addr", "--monitor-interval"),
            *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
        ),
        _CLUSTER,
    ),
    **dict.fromkeys(
        ("--start-method", "--role", "--local-ranks-filter", "--logs-specs", "--event-log-handler"), _UNUSED
    ),
}
_SHORT = {"--redirects": ("-r",), "--tee": ("-t",)}
_FLAGS_LEFT_OUT = {"--run-path": _UNUSED, "--virtual-local-rank": _UNUSED}
_RUNNERS = ("torch.distributed.run", "torch.distributed.launch")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration for a command of torchrun. notes: its options that are left out, with the reason."""

    config: dict[str, Any]
    name: str
    notes: tuple[str, ...]


def translate(command: str) -> Translation:
    """Translate a command line such as `torchrun --nnodes 2 --nproc-per-node 8 train.py --lr 0.1`.

    Raises UsageError for a command that is not torchrun's, for an option that torchrun does not have, and for wrong
    values; the message names them.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--from torchrun: the command can't be read: {error}") from None
    env: dict[str, str] = {}
    while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
        env[assigned[1]] = assigned[2]
        words = words[1:]
    is_launch, options = _without_program(words)
    parsed = _parsed(options)
    if parsed.no_python:
        raise UsageError(f"--from torchrun: --no-python: {REPLACEMENTS['--no-python']}")
    workload: dict[str, Any] = {"module" if parsed.module else "script": parsed.program}
    if parsed.arguments:
        workload["args"] = parsed.arguments
    if is_launch and not parsed.use_env:
        workload["local_rank_arg"] = True
    config: dict[str, Any] = {"workload": workload, "cluster": _cluster(parsed.nnodes, parsed.nproc_per_node)}
    if parsed.max_restarts:
        config["failure"] = {"max_restarts": parsed.max_restarts}
    if env:
        config["env"] = env
    stem = re.split(r"[./]", parsed.program.removesuffix(".py").rstrip("/"))[-1]
    return Translation(config, stem or "train", tuple(_notes(parsed)))


def _without_program(words: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Return whether the command is torch.distributed.launch, and the words after the program."""
    program = words[0].rpartition("/")[2] if words else ""
    if program == "torchrun":
        return False, words[1:]
    if re.fullmatch(r"python[0-9.]*", program):
        place = next((i for i, word in enumerate(words) if word == "-m"), len(words))
        if words[place + 1 : place + 2] and words[place + 1] in _RUNNERS:
            return words[place + 1] == _RUNNERS[1], words[place + 2 :]
    raise UsageError(
        f'--from torchrun: "{program or "nothing"}" is not a command of torchrun: give all of it in quotes, as '
        '"torchrun --nproc-per-node 2 train.py"'
    )


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    import argparse  # not needed for other commands

    parser = argparse.ArgumentParser(prog="torchrun", add_help=False, allow_abbrev=False, exit_on_error=False)

    def add(name: str, *short: str, **kwargs: Any) -> None:
        other = f"--{name.removeprefix('--').replace('-', '_')}"
        parser.add_argument(*dict.fromkeys((name, other)), *short, **kwargs)

    add("--nnodes", default="1")
    add("--nproc-per-node", default="1")
    add("--max-restarts", type=int, default=0)
    for name in _LEFT_OUT:
        add(name, *_SHORT.get(name, ()))
    for name in ("--standalone", "--no-python", "--use-env", *_FLAGS_LEFT_OUT):
        add(name, action="store_true")
    add("--module", "-m", action="store_true")
    parser.add_argument("program", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    try:
        options, unknown = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"--from torchrun: {error}") from None
    if unknown:
        raise UsageError(f"--from torchrun: torchrun has no option {', '.join(unknown)}")
    if not options.program:
        raise UsageError("--from torchrun: the command contains no script")
    if options.program.startswith("-"):
        raise UsageError(f"--from torchrun: {options.program} is not an option of torchrun")
    return options


def _notes(parsed: argparse.Namespace) -> Iterator[str]:
    for name, reason in {**_LEFT_OUT, **_FLAGS_LEFT_OUT}.items():
        if getattr(parsed, name.lstrip("-").replace("-", "_")):
            yield f"{name} is left out: {reason}"


def _cluster(nnodes: str, per_node: str) -> dict[str, Any]:
    """Return the cluster section: the ranks of all hosts; several hosts are a cluster that the user has to start."""
    nodes = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", nnodes)
    if nodes is None:
        raise UsageError(f'--from torchrun: --nnodes is a number or MIN:MAX, got "{nnodes}"')
    least, most = int(nodes[1]), int(nodes[2] or nodes[1])
    if least > most:
        raise UsageError(f'--from torchrun: --nnodes: the first number is the smaller one, got "{nnodes}"')
    cluster: dict[str, Any] = {"name": "hosts"} if most > 1 else {}
    if per_node in ("auto", "gpu", "cpu"):
        cluster["ranks"] = "auto"
    elif re.fullmatch(r"[1-9][0-9]{0,5}", per_node):
        count = int(per_node)
        cluster["ranks"] = most * count if least == most else {"min": least * count, "max": most * count}
    else:
        raise UsageError(f'--from torchrun: --nproc-per-node is a number, auto, gpu or cpu, got "{per_node}"')
    return cluster | ({"gpus": 0} if per_node == "cpu" else {})
