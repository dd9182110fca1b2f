"""`ddptrain results tag` and `note`: mark runs, also while they are running."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperCommand

from ddptrain.cli.options import JsonOption
from ddptrain.cli.printing import print_result
from ddptrain.cli.runs.choice import Run, RunsDir, place_of

_MARK = "\0"  # no argument contains it


class TagCommand(TyperCommand):
    """A command whose arguments may begin with a minus: `-old` is a tag to remove, not options."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """See click.Command."""
        kept = [_MARK + arg if arg[:1] == "-" and arg[1:2] not in ("", "-") and arg != "-h" else arg for arg in args]
        return super().parse_args(ctx, kept)


def tag(
    ctx: typer.Context,
    run: Run,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[+TAG|-TAG]...", help="+good adds a tag, -old removes one.")
    ] = None,
    runs_dir: RunsDir = None,
    json: JsonOption = False,
) -> None:
    """Add tags to a run, or remove them: ddptrain results tag latest +good -old. Without tags it prints them."""
    from ddptrain.results.annotations.annotations import tag_changes

    add, remove = tag_changes(word.removeprefix(_MARK) for word in tags or ())
    runs, name = place_of(ctx, runs_dir, run)
    if add or remove:
        found = runs.annotate(name, lambda before: before.with_tags(add, remove))
    else:
        found = runs.find(name).annotations
    print_result({"tags": found.tags, "note": found.note}, [" ".join(found.tags) or "no tags"], as_json=json)


def note(
    ctx: typer.Context,
    run: Run,
    text: Annotated[
        str | None, typer.Argument(help='The note, which replaces the one before; "" deletes it.', show_default=False)
    ] = None,
    runs_dir: RunsDir = None,
    json: JsonOption = False,
) -> None:
    """Write a note on a run: ddptrain results note latest "larger batches". Without a text it prints the note."""
    from dataclasses import replace

    from ddptrain.results.annotations.annotations import checked_note

    runs, name = place_of(ctx, runs_dir, run)
    if text is not None:
        checked = checked_note(text)
        found = runs.annotate(name, lambda before: replace(before, note=checked))
    else:
        found = runs.find(name).annotations
    print_result({"tags": found.tags, "note": found.note}, [found.note or "no note"], as_json=json)
