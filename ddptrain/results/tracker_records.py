"""Finds what trackers have created for a run: run.json has what the ranks reported; W&B runs may be sent later."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

from ddptrain.results.layout import TRACKING, RunLayout
from ddptrain.results.run_record import RunRecord
from ddptrain.tracking.wandb_files import LINKS, SENDING, RunPart, links_of, parts_below, parts_in

WANDB = "wandb"
RECORDED = f"{TRACKING}/{WANDB}"  # in the run directory: what W&B has recorded
TEMPORARY = (f"{RECORDED}/cache/", f"{RECORDED}/{SENDING}")  # wandb needs these only during the run
_RUNS = "runs"  # the default folder of runs
_NUMBER = re.compile(r"(\d+)")


def run_argument(layout: RunLayout) -> str:
    """Return the argument RUN for a command in the current directory: the run's id, or its directory or URL."""
    if layout.is_original and layout.root.absolute().parent == Path(_RUNS).absolute():
        return layout.root.name
    return shlex.quote(layout.where)


def tracker_outputs(layout: RunLayout, record: RunRecord) -> dict[str, dict[str, str]]:
    """By tracker (or `wandb/rank_1` for another rank): its id, url, folder and so on, as far as they are known.

    Includes the URLs of W&B runs that were sent afterwards. A W&B run that was created only for sending is called
    `wandb/<its id>`.
    """
    links = _links(layout) if record.tracking else {}
    outputs = {name: dict(record.tracking[name]) for name in sorted(record.tracking, key=_by_number)}
    for about in outputs.values():
        if about.get("id") in links:
            about.setdefault("url", links[about["id"]])
    known = {about.get("id") for about in outputs.values()}
    others = sorted(links.keys() - known, key=_by_number)
    return outputs | {f"{WANDB}/{run_id}": {"id": run_id, "url": links[run_id]} for run_id in others}


def _links(layout: RunLayout) -> dict[str, str]:
    with suppress(OSError):
        return links_of(layout.read(f"{RECORDED}/{LINKS}"))
    return {}


def _by_number(name: str) -> list[str | int]:
    """Return a sort key: rank_2 comes before rank_10."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)]


def wandb_parts(layout: RunLayout, record: RunRecord) -> list[RunPart]:
    """Return the parts of a run's W&B runs, including those in another folder (WANDB_DIR)."""
    parts = parts_below(layout.tracking_dir / WANDB)
    part_ids = {part.run_id for part in parts}
    others = [about for about in record.tracking.values() if about.get("id", "") not in {"", *part_ids}]
    for folder in {Path(about["folder"]).parent for about in others if about.get("folder")}:
        parts += [part for part in parts_in(folder) if part.run_id in {about["id"] for about in others}]
    return parts
