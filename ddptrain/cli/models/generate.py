"""`ddptrain generate`: prints new pet names of a trained run."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ddptrain.cli.models.models import RunOrModel, open_trained
from ddptrain.cli.options import JsonOption
from ddptrain.cli.printing import print_result, say
from ddptrain.config.wording import counted


def generate(
    run: RunOrModel,
    count: Annotated[int, typer.Option(help="Number of names to generate.")] = 50,
    prefix: Annotated[str, typer.Option(help="Text that each name begins with.")] = "",
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature: below 1 more usual names, above 1 more unusual ones.")
    ] = 0.8,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same names.", min=0)] = None,
    keep_known: Annotated[bool, typer.Option("--keep-known", help="Keep names that are in the training list.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make new pet names with a trained run, one per line; none of them is in the run's own list."""
    from ddptrain.workloads.petnames.generate import generate_names

    run_dir, source = open_trained(run, "petnames")
    made = generate_names(run_dir, count, prefix, temperature, seed, keep_known)
    print_result({**source, **dataclasses.asdict(made)}, made.names, as_json=as_json, indent=None)
    dropped, were = made.dropped_known, "was" if made.dropped_known == 1 else "were"
    remarks = [
        f"the seed was {made.seed}" if seed is None else "",
        f"{counted(dropped, 'name')} of the training list {were} replaced" if dropped else "",
        f"only {len(made.names):,} of {count:,} names: gave up after {made.attempts:,} attempts; "
        "try a higher --temperature, a shorter --prefix, or --keep-known"
        if made.limit_reached
        else "",
    ]
    for remark in filter(None, remarks):
        say(f"generate: {remark}")
