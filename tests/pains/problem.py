"""One problem of launchers: what happens, where it was reported, how it is shown, and what must be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.pains.scene import Scene

Play = Callable[[Scene], None]


@dataclass(frozen=True, slots=True)
class Show:
    """How one launcher is shown, and what its output must contain.

    play: runs commands in a scene, which records their output. keep: regular expressions of the lines that the page
    shows (all lines if empty). must: regular expressions that must be found in the whole output, in any order.
    never: regular expressions that must not be found. verdict: one sentence below the output. tries: of a problem that
    depends on the moment; the page then shows the first run that has it.
    """

    play: Play
    must: tuple[str, ...]
    keep: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    verdict: str = ""
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. threads: "owner/repository#number". avoided: Markdown, with a link into docs/.

    equal: in which respect the peer is as good or better, or "".
    """

    name: str
    title: str
    happens: str
    threads: tuple[str, ...]
    files: Mapping[str, str]
    peer: Show
    ours: Show
    avoided: str
    equal: str = ""
    peer_files: Mapping[str, str] = field(default_factory=dict)  # what only the peer runs
    peer_name: str = "torchrun"


def run(command: str, timeout_s: float = 150.0, after: str = "") -> Play:
    """A play of one command that ends by itself, or is ended `timeout_s` after a line that matches `after`."""

    def play(scene: Scene) -> None:
        scene.run(command, timeout_s, after)

    return play


TORCHRUN = "torchrun --standalone --nproc-per-node 2 train.py"
DDPTRAIN_SCRIPT = "ddptrain run --ranks 2 train.py"
DDPTRAIN = "ddptrain train train.yaml"
YAML = "workload: train:train\ncluster: {ranks: 2}\n"
