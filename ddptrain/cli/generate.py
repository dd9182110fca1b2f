"""`ddptrain generate`: new pet names from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[str, typer.Argument(help="A run's id, an unambiguous prefix of it, latest, or its directory.")],
    runs_dir: Annotated[Path, typer.Option(help="The folder that holds the runs.")] = Path("runs"),
    count: Annotated[int, typer.Option(help="How many names.")] = 50,
    prefix: Annotated[str, typer.Option(help="What each name begins with.")] = "",
    temperature: Annotated[float, typer.Option(help="1 samples as trained; less plays safe, more dares.")] = 0.8,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same names.", min=0)] = None,
    keep_known: Annotated[bool, typer.Option("--keep-known", help="Keep names that the run's list holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make new pet names with a trained run, one a line; none of them is in the list it was trained on."""
    import dataclasses
    import json

    from ddptrain.results.find import find_run
    from ddptrain.workloads.petnames.generate import generate_names

    run_dir = find_run(runs_dir, run)
    made = generate_names(run_dir, count, prefix, temperature, seed, keep_known)
    if as_json:
        typer.echo(json.dumps({"run_id": run_dir.name, **dataclasses.asdict(made)}))
    else:
        for name in made.names:
            typer.echo(name)
    remarks = [
        f"the seed was {made.seed}" if seed is None else "",
        f"{made.dropped_known:,} that the list already holds were replaced" if made.dropped_known else "",
        f"only {len(made.names):,} of {count:,} names: gave up after {made.attempts:,} attempts; "
        "try a higher --temperature, a shorter --prefix, or --keep-known"
        if made.limit_reached
        else "",
    ]
    for remark in filter(None, remarks):
        typer.echo(f"generate: {remark}", err=True)
