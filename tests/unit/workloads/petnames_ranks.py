"""The ranks of real gloo groups that run the pet-name workload case after case, and write what they saw.

python petnames_ranks.py FOLDER WORLD_SIZE ...    FOLDER/cases.json holds
                                                  [{"params", "resume_from"?, "stop_after"?}, ...]
Each rank takes part in the groups of those sizes that have such a rank, one after the other. All ranks are forked from
this program, since an import of torch takes 3 s of CPU time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.agreement import Agreement, PreemptedExit
from ddptrain.rank.context import RankContext
from ddptrain.rank.output import Emitter
from ddptrain.rank.warmup import import_everything
from ddptrain.workloads.petnames import train as workload
from tests.unit.specs import make_spec


class WatchedContext(RankContext):
    """A rank's context that writes to a folder, and remembers what it was told."""

    def __init__(self, spec: RankSpec, folder: Path, stop_after: int | None) -> None:
        (folder / f"staging-{spec.rank}").mkdir()
        self._events = (folder / f"events-{spec.rank}").open("ab", buffering=0)
        self._asked = Agreement(spec)
        super().__init__(spec, Emitter(self._events.fileno()), torch.device("cpu"), self._asked)
        self.logged: list[dict[str, Any]] = []
        self.progressed: list[tuple[float, float | None, str]] = []
        self._folder, self._calls_left = folder, stop_after

    def log(
        self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None, epoch: float | None = None
    ) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        self.logged.append({"values": numbers, "step": step, "epoch": epoch})

    def progress(self, done: float, total: float | None = None, *, unit: str = "samples") -> None:
        self.progressed.append((done, total, unit))

    def save_file(self, path: str, data: bytes | str | Path) -> None:
        (self._folder / path).write_text(str(data))

    def checkpoint(self, **what: Any) -> bool:
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left == 0:
                self._asked.end()
        return super().checkpoint(**what)

    def hand_over(self) -> None:
        """Leave the newest checkpoint as FOLDER/checkpoint."""
        self.close()
        dist.barrier()
        if self.rank == 0:
            told = [events.decode(line) for line in (self._folder / "events-0").read_bytes().splitlines()]
            *_, saved = [event for event in told if isinstance(event, events.CheckpointSaved)]
            (self._folder / "staging-0" / saved.staging).rename(self._folder / "checkpoint")
        dist.barrier()
        self._events.close()


def join(root: Path, rank: int, world_size: int) -> int:
    """Bring the group up, with a store that rank 0 hosts; return the store's port."""
    note = root / f"port-{world_size}"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        note.with_suffix(".new").write_text(str(store.port))
        note.with_suffix(".new").rename(note)
    else:
        while not note.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(note.read_text()))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return int(store.port)


def run_ranks(script: Path, root: Path, world_sizes: Sequence[int]) -> None:
    """Run this program or images_ranks.py to its end; all ranks must succeed. Rank N prints to output-N.txt."""
    output = root / "output.txt"
    command = [sys.executable, str(script), str(root), *map(str, world_sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.wait(350)
    except subprocess.TimeoutExpired:
        raise AssertionError(_said(root)) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # all ranks have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, _said(root)


def _said(root: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(root.glob("output*.txt")))


def run_groups(run_group: Callable[[Path, int, int], None]) -> NoReturn:
    """Be this program: folder and sizes of the groups are its arguments. It ends as soon as a rank fails."""
    root, *world_sizes = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    import_everything()

    def take_part(rank: int) -> None:
        for world_size in world_sizes:
            if rank < world_size:
                run_group(root, rank, world_size)

    for rank in range(max(world_sizes)):
        if os.fork() == 0:
            _be_rank(rank, root / f"output-{rank}.txt", take_part)
    for _ in range(max(world_sizes)):
        if os.wait()[1]:
            sys.exit(1)  # the other ranks wait for it: `run_ranks` kills them
    sys.exit(0)


def _be_rank(rank: int, output: Path, take_part: Callable[[int], None]) -> NoReturn:
    """Be a rank in this process, which was forked for it."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        take_part(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_cases(root: Path, rank: int, world_size: int) -> None:
    """All cases, in a group of that size."""
    port = join(root, rank, world_size)
    for number, case in enumerate(json.loads((root / "cases.json").read_text())):
        folder = root / f"world-{world_size}" / f"case-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        resume_from = str(folder.parent / case["resume_from"]) if "resume_from" in case else ""
        spec = make_spec(
            attempt=number + 1,
            rank=rank,
            world_size=world_size,
            master_addr="127.0.0.1",
            master_port=port,
            every_epochs=None,
            resume_from=resume_from,
            grace_s=60.0,  # for the slowest rank to be told to end
            staging=str(folder / f"staging-{rank}"),
        )
        ctx = WatchedContext(spec, folder, case.get("stop_after"))
        with contextlib.suppress(PreemptedExit):
            workload.train(ctx, **case["params"])
        ctx.hand_over()
        seen = {"logged": ctx.logged, "progressed": ctx.progressed}
        (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_groups(run_cases)
