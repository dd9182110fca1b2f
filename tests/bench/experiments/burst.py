"""Many log lines at once: whether all arrive, how fast, and how much memory the driver needs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_RANKS = 2
_SAMPLE_S = 0.05
_TIMEOUT_S = 300.0


@dataclass
class _Watched:
    """The output of a command, and its memory over time."""

    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The complete output."""
        return b"".join(chunk for _, chunk in self.chunks).decode()

    def last_s(self, prefix: bytes) -> float:
        """The arrival time of the last chunk with a line of a rank."""
        return max(at for at, chunk in self.chunks if prefix in chunk)

    def grown_bytes(self, since_s: float) -> int:
        """The maximum memory after `since_s` (seconds since the epoch) minus the last value before it."""
        before = [rss for at, rss in self.rss if at <= since_s]
        after = [rss for at, rss in self.rss if at > since_s]
        if not before or not after:
            raise BenchError(f"{len(before)} samples of memory before the burst, {len(after)} after it: too few")
        return max(after) - before[-1]


def _watch(stage: Stage, command: Sequence[str]) -> _Watched:
    """Run the command with its stdout read as fast as it comes, sampling the command's memory."""
    watched = _Watched()
    errors = stage.new_folder("errors") / "stderr"
    with errors.open("wb") as err, stage.started(command, stdout=subprocess.PIPE, stderr=err.fileno()) as popen:
        reader = threading.Thread(target=_read, args=(popen, watched), daemon=True)
        reader.start()
        process = psutil.Process(popen.pid)
        deadline = time.monotonic() + _TIMEOUT_S
        while popen.poll() is None:
            if time.monotonic() > deadline:
                raise BenchError(f"{command} took over {_TIMEOUT_S:g} s")
            with suppress(psutil.Error):
                watched.rss.append((time.time(), process.memory_info().rss))
            time.sleep(_SAMPLE_S)
        reader.join()
    if popen.returncode:
        raise BenchError(f"{command} ended with {popen.returncode}: {errors.read_text(errors='replace')[-2000:]}")
    return watched


def _read(popen: subprocess.Popen[bytes], watched: _Watched) -> None:
    assert popen.stdout is not None
    with popen.stdout as pipe:
        while chunk := pipe.read1(1 << 20):  # type: ignore[attr-defined]
            watched.chunks.append((time.time(), chunk))


def _began_s(folder: Path) -> float:
    return min(float((folder / f"begin-{rank}").read_text()) for rank in range(_RANKS))


def _wrong(found: Sequence[str], wanted: Sequence[str]) -> int:
    """The number of misplaced, missing and surplus lines."""
    return sum(a != b for a, b in zip(found, wanted, strict=False)) + abs(len(found) - len(wanted))


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    lines = stage.sizes.burst_lines
    wanted = [[f"{number:06d} of rank {rank}" for number in range(lines)] for rank in range(_RANKS)]

    def ddptrain() -> Figures:
        folder = stage.new_folder("ddptrain")
        runs = folder / "runs"
        options = ["--runs-dir", str(runs), "--run-id", "run"]
        watched = _watch(stage, stage.ddptrain("burst", _RANKS, *options, folder=str(folder), lines=lines))
        shown = watched.text.splitlines()
        wrong = 0
        for rank in range(_RANKS):
            prefix = f"[rank {rank}] "
            wrong += _wrong([line.removeprefix(prefix) for line in shown if line.startswith(prefix)], wanted[rank])
            wrong += _wrong((runs / f"run/logs/rank-{rank}.log").read_text().splitlines(), wanted[rank])
        began_s = _began_s(folder)
        return {
            "wrong_lines": wrong,
            "growth_mb": watched.grown_bytes(began_s) / 1e6,
            "lines_per_s": _RANKS * lines / (watched.last_s(b"[rank ") - began_s),
        }

    def torchrun() -> Figures:
        folder = stage.new_folder("torchrun")
        options = ["--tee", "3", "--log-dir", str(folder / "logs")]
        fewer = stage.sizes.burst_lines_peer
        watched = _watch(stage, stage.torchrun("burst", _RANKS, *options, folder=str(folder), lines=fewer))
        return {"lines_per_s": _RANKS * fewer / (watched.last_s(b"[default") - _began_s(folder))}

    yield {"torchrun-tee": torchrun, "ddptrain-burst": ddptrain}


def _row(name: str, unit: str, figure: str, goal: Goal | None, what: str, *, against_peer: bool) -> Row:
    return Row(
        name=name,
        unit=unit,
        ours=Source("ddptrain-burst", figure),
        peer=Source("torchrun-tee", figure) if against_peer else None,
        peer_name="torchrun --tee 3" if against_peer else "",
        goal=goal,
        what=what,
    )


EXPERIMENT = Experiment(
    rows=(
        _row(
            "burst-wrong-lines",
            "lines",
            "wrong_lines",
            Goal("ours", "<=", 0),
            "100,000 lines by each of 2 ranks at once, --output plain into a pipe: lines missing, doubled or out of "
            "order in the pipe and in logs/rank-*.log together",
            against_peer=False,
        ),
        _row(
            "burst-memory",
            "MB",
            "growth_mb",
            Goal("ours", "<=", 50),
            "growth of the driver's resident memory, read every 50 ms: the most since the first line less that before",
            against_peer=False,
        ),
        _row(
            "burst-rate",
            "lines/s",
            "lines_per_s",
            None,
            "from the first line printed to the last read; torchrun, slow at it, prints 20,000 a rank",
            against_peer=True,
        ),
    ),
    open=_open,
)
