"""One rank of a real gloo group that runs the pet-name workload case after case, and writes what it saw.

python petnames_ranks.py FOLDER RANK WORLD_SIZE     FOLDER/cases.json holds [{"params", "resume_from"?}, ...]
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ddptrain.rank import checkpoint
from ddptrain.rank.context import RankContext, Resumed
from ddptrain.workloads.petnames import train as workload
from ddptrain.workloads.petnames.data import Share


class FakeContext:
    """The part of RankContext that the workload uses, writing to a folder."""

    def __init__(self, rank: int, world_size: int, folder: Path, resume_from: Path | None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        self.logged: list[dict[str, Any]] = []
        self.progressed: list[tuple[float, float | None, str]] = []
        self._folder, self._resume_from = folder, resume_from

    def log(self, values: Mapping[str, float], *, step: int | None = None, epoch: float | None = None) -> None:
        self.logged.append({"values": dict(values), "step": step, "epoch": epoch})

    def progress(self, done: float, total: float | None = None, *, unit: str = "samples") -> None:
        self.progressed.append((done, total, unit))

    def save_file(self, path: str, data: str) -> None:
        (self._folder / path).write_text(data)

    def checkpoint(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        epoch: float,
        metrics: Mapping[str, float],
        last: bool,
        **more: Any,
    ) -> None:
        if self.rank == 0 and last:
            folder = self._folder / "checkpoint"
            checkpoint.write(folder, model, optimizer, step=step, epoch=epoch, metrics=metrics, more=more)
        dist.barrier()

    def resume(self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Resumed | None:
        if self._resume_from is None:
            return None
        state = checkpoint.read(self._resume_from, model, optimizer, self.device)
        return Resumed(state["step"], state["epoch"], state["extra"])


def record_rows(trainer: type[workload._Trainer]) -> list[list[int]]:
    """Every part of every share that counts, in order, as the trainer takes it."""
    taken: list[list[int]] = []
    parts = trainer._parts

    def recording(self: workload._Trainer, share: Share) -> Iterator[tuple[torch.Tensor, float, bool]]:
        for index, weight, is_last in parts(self, share):
            if weight:
                taken.append(index.tolist())
            yield index, weight, is_last

    trainer._parts = recording  # type: ignore[method-assign]
    return taken


def main() -> None:
    root, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = f"file://{root}/store-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    taken = record_rows(workload._Trainer)
    for number, case in enumerate(json.loads((root / "cases.json").read_text())):
        folder = root / f"world-{world_size}" / f"case-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        resume_from = folder.parent / case["resume_from"] if "resume_from" in case else None
        taken.clear()
        ctx = FakeContext(rank, world_size, folder, resume_from)
        workload.train(cast("RankContext", ctx), **case["params"])
        seen = {"rows": taken, "logged": ctx.logged, "progressed": ctx.progressed}
        (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
