"""`ddptrain results consolidate`: writes a checkpoint of a sharded model as one safetensors checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from ddptrain.cli.printing import print_json, write
from ddptrain.cli.runs.choice import Json, Run, RunsDir, view_of


def consolidate(
    ctx: typer.Context,
    run: Run,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the checkpoint.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The checkpoint of this step.  [default: the best, or newest]")
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write a checkpoint of a sharded model as one safetensors checkpoint, without a GPU.

    It has model.safetensors, or above 5 GB several files and model.safetensors.index.json. All files of the checkpoint
    are compared with their hashes first. `ddptrain predict` accepts the folder.
    """
    from pathlib import Path

    from ddptrain.results import consolidation
    from ddptrain.results.layout import BEST, step_name
    from ddptrain.results.lookup import find_checkpoint
    from ddptrain.results.run_store import NeededFiles
    from ddptrain.results.show.render import size

    which = BEST if step is None else step_name(step)
    view = view_of(ctx, runs_dir, run, NeededFiles.MODEL, which)
    checkpoint = find_checkpoint(view.layout, which)
    target = Path(output).expanduser().absolute()
    done = consolidation.consolidate(checkpoint, target, more=[view.layout.run_json])
    if json:
        about = {"run_id": view.run_id, "step": done.step, "folder": str(done.folder), "files": list(done.files)}
        print_json({**about, "tensors": done.tensors, "size_bytes": done.n_bytes})
    else:
        what = f"{done.tensors:,} tensors, {size(done.n_bytes)}"
        write([f"{view.run_id}: step {done.step} written to {done.folder}: {what}"])
