"""The parts of a W&B run on the disk: a folder for each time that wandb has opened it, and how each of them stands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINKS = "links.json"  # beside the parts: where those that were sent afterwards are to be seen, by their id
UNSENT = "unsent"  # in the folder of a run that was online: the server does not have all of it
OPEN = "open"  # what stands there until it comes to its end
CHECKPOINT_TYPE = "model"  # of artifacts that are checkpoints
_NAME = re.compile(r"(?P<offline>offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_SHARE = re.compile(r"-(?P<rank>rank_\d+)")


@dataclass(frozen=True, slots=True)
class Part:
    """One of these folders; `log` is the file with everything that was logged."""

    folder: Path
    log: Path
    run_id: str  # in W&B; parts of the same run follow each other
    began: str
    offline: bool
    rank: str = ""  # as rank_1: of a run that ranks share, what this one has logged

    @property
    def target(self) -> str:
        """The run that it is sent to afterwards: a rank's share to one of its own, for the server would mix up rows."""
        return f"{self.run_id}-{self.rank}" if self.rank else self.run_id

    @property
    def sent(self) -> bool:
        """Whether the server has all of it: wandb leaves a mark where it has sent it afterwards."""
        if self.log.with_suffix(".wandb.synced").exists():
            return True
        return not self.offline and not (self.folder / UNSENT).exists()


def waiting(parts: Sequence[Part]) -> list[Part]:
    """Those parts that the server lacks something of.

    An online one that was killed, and whose run went on online after it, is none: what was sent again would come twice.
    """
    return [part for part in parts if not part.sent and not (_was_killed(part) and _went_on(part, parts))]


def _was_killed(part: Part) -> bool:
    try:
        return not part.offline and (part.folder / UNSENT).read_text(encoding="utf-8") == OPEN
    except (OSError, ValueError):
        return False


def _went_on(part: Part, parts: Sequence[Part]) -> bool:
    family = [each for each in parts if each.target == part.target]
    return any(each.sent for each in family[family.index(part) + 1 :])


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is below a run directory, or below another folder that holds some."""
    return folder / "checkpoints" / f"step-{step}"


def parts_below(folder: Path) -> list[Part]:
    """The parts in `folder` or one below it, in the order in which they were begun."""
    found = []
    for log in {*folder.glob("*/run-*.wandb"), *folder.glob("*/*/run-*.wandb")}:
        match = _NAME.fullmatch(log.parent.name)
        if match and log.is_file() and not log.is_symlink():
            run_id = log.stem.removeprefix("run-")
            shared = _SHARE.fullmatch(match["id"].removeprefix(run_id))
            rank = shared["rank"] if shared else ""
            found.append(Part(log.parent, log, run_id, match["time"], match["offline"] is not None, rank))
    return sorted(found, key=lambda part: (part.began, part.folder.name))


def links_in(folder: Path) -> dict[str, str]:
    """Where runs that were sent afterwards are to be seen, by their id."""
    try:
        known = json.loads((folder / LINKS).read_text(encoding="utf-8"))
        return {str(run_id): str(url) for run_id, url in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}
