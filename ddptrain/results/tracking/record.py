"""What trackers have made of a run: what ranks have told of it, and where it was sent afterwards."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ddptrain.protocol.wandb_parts import SENDING, Part, links_in, parts_below, parts_in
from ddptrain.results.layout import TRACKING, RunLayout
from ddptrain.results.record import RunRecord

WANDB = "wandb"
RECORDED = f"{TRACKING}/{WANDB}"  # in the run directory: what W&B keeps there
OF_NO_USE = (f"{RECORDED}/cache/", f"{RECORDED}/{SENDING}")  # but to wandb, while the run is on
_RUNS = "runs"  # where commands look, unless told otherwise
_NUMBER = re.compile(r"(\d+)")


def to_type(layout: RunLayout) -> str:
    """What stands for RUN on a command line of this folder: the run's id, or where it is."""
    if layout.is_original and layout.root.absolute().parent == Path(_RUNS).absolute():
        return layout.root.name
    return shlex.quote(layout.where)


def made_by_trackers(layout: RunLayout, record: RunRecord) -> dict[str, dict[str, str]]:
    """By tracker, or `wandb/rank_1` for another rank's: its id, url, folder and so on, as far as they are known.

    What was sent to W&B afterwards has its url there, too; a run that was made for it alone is called `wandb/<its id>`.
    """
    links = links_in(layout.tracking_dir / WANDB) if record.tracking else {}
    made = {name: dict(record.tracking[name]) for name in sorted(record.tracking, key=_by_number)}
    for about in made.values():
        if about.get("id") in links:
            about.setdefault("url", links[about["id"]])
    known = {about.get("id") for about in made.values()}
    others = sorted(links.keys() - known, key=_by_number)
    return made | {f"{WANDB}/{run_id}": {"id": run_id, "url": links[run_id]} for run_id in others}


def _by_number(name: str) -> list[str | int]:
    """Sorts rank_2 before rank_10."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)]


def wandb_parts(layout: RunLayout, record: RunRecord) -> list[Part]:
    """The parts of a run's W&B runs, also of those that the user has kept elsewhere (WANDB_DIR)."""
    parts = parts_below(layout.tracking_dir / WANDB)
    here = {part.run_id for part in parts}
    found = [about for about in record.tracking.values() if about.get("id", "") not in {"", *here}]
    for folder in {Path(about["folder"]).parent for about in found if about.get("folder")}:
        parts += [part for part in parts_in(folder) if part.run_id in {about["id"] for about in found}]
    return parts
