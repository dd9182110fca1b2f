"""The ranks of real gloo groups that run the image workload case after case, and write what they saw.

python images_ranks.py FOLDER WORLD_SIZE ...    FOLDER/cases.json holds
                                     [{"inputs", "params", "resume_from"?, "stop_after"?, "worlds"?}, ...]
Each rank takes part in the groups of those sizes that have such a rank, one after the other: see petnames_ranks.py.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddptrain.rank.context import PreemptedExit
from ddptrain.workloads.images import train as workload
from tests.unit.specs import make_spec
from tests.unit.workloads.petnames_ranks import WatchedContext, join, run_groups


class ImagesContext(WatchedContext):
    """Keeps files under their names, and pictures and tables as what was handed over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pictures: list[tuple[int | None, list[int], str]] = []
        self.tables: list[tuple[str, list[Any]]] = []
        self.taken: list[list[int]] = []

    def loader(self, dataset: Any, **how: Any) -> Any:
        return super().loader(Seen(dataset, self.taken), **how)  # type: ignore[arg-type]

    def save_file(self, path: str, data: bytes | str | Path) -> None:
        assert isinstance(data, bytes)
        (self._folder / Path(path).name).write_bytes(data)

    def log_image(self, name: str, image: Any, *, step: int | None = None, caption: str = "") -> None:
        self.pictures.append((step, list(image.shape), caption))

    def log_table(self, name: str, columns: Any, rows: Any, **_: Any) -> None:
        self.tables.append((name, [row[1:] for row in rows]))


class Seen:
    """A data set that notes the images of each batch, in order."""

    def __init__(self, data: Any, taken: list[list[int]]) -> None:
        self._data, self._taken = data, taken

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, places: Any) -> Any:
        batch = self._data.__getitems__(places)
        self._taken.append(batch.index.tolist())
        return batch


def run_cases(root: Path, rank: int, world_size: int) -> None:
    """All cases for groups of that size, in one."""
    port = join(root, rank, world_size)
    for number, case in enumerate(json.loads((root / "cases.json").read_text())):
        if world_size not in case.get("worlds", [world_size]):
            continue
        folder = root / f"world-{world_size}" / f"case-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        spec = make_spec(
            attempt=number + 1,
            rank=rank,
            world_size=world_size,
            master_addr="127.0.0.1",
            master_port=port,
            every_epochs=None,
            grace_s=60.0,  # for the slowest rank to be told to end
            inputs=str(root / case["inputs"]),
            resume_from=str(folder.parent / case["resume_from"]) if "resume_from" in case else "",
            staging=str(folder / f"staging-{rank}"),
        )
        ctx = ImagesContext(spec, folder, case.get("stop_after"))
        failure = ""
        try:
            with contextlib.suppress(PreemptedExit):
                workload.train(ctx, **case["params"])
        except Exception as error:
            if "fails" not in case:
                raise
            failure = f"{type(error).__name__}: {error}"
        if "fails" not in case:
            ctx.hand_over()
        seen = {
            "images": ctx.taken,
            "logged": ctx.logged,
            "progressed": ctx.progressed,
            "pictures": ctx.pictures,
            "tables": ctx.tables,
            "failure": failure,
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_groups(run_cases)
