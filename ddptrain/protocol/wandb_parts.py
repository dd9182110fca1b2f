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
SENT = "sent"  # what stands there once the server has all of it; it stays, as in an object store nothing is taken away
SYNCED = ".wandb.synced"  # ends what wandb leaves beside a log that it has sent afterwards
SYNC_STATE = ".wandb.syncstate"  # has the steps of a part that was sent by half be the same when it is sent again
STATE_FILES = (f"/{UNSENT}", SYNCED, SYNC_STATE)  # the ends of the names of what says how a part stands
SENDING = "sending-rank-"  # begins the name of a folder beside the parts: checkpoints on their way to the server
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
        if self.log.with_suffix(SYNCED).exists():
            return True
        return not self.offline and self.mark in (None, SENT)

    @property
    def mark(self) -> str | None:
        """What the file UNSENT says; None where there is none."""
        try:
            return (self.folder / UNSENT).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def waiting(parts: Sequence[Part]) -> list[Part]:
    """Those parts that the server lacks something of.

    An online one that was killed, and whose run went on online after it, is none: what was sent again would come twice.
    """
    return [part for part in parts if not part.sent and not (_was_killed(part) and _went_on(part, parts))]


def _was_killed(part: Part) -> bool:
    return not part.offline and part.mark == OPEN


def _went_on(part: Part, parts: Sequence[Part]) -> bool:
    family = [each for each in parts if each.target == part.target]
    return any(each.sent for each in family[family.index(part) + 1 :])


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is below a run directory, or below another folder that holds some."""
    return folder / "checkpoints" / f"step-{step}"


def parts_below(folder: Path) -> list[Part]:
    """The parts in `folder` or one below it, in the order in which they were begun."""
    outer = _entries(folder)
    return _parts([*outer, *(inner for each in outer for inner in _entries(each))])


def parts_in(folder: Path) -> list[Part]:
    """Those in `folder`, which may be any: nothing else in it is looked into. None where it can't be read."""
    return _parts(_entries(folder))


def _entries(folder: Path) -> list[Path]:
    """What is in it; nothing, where it is no folder, can't be read, or has just gone (Path.glob would raise)."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _parts(folders: Sequence[Path]) -> list[Part]:
    """Those among these folders."""
    found = []
    named = [(folder, match) for folder in folders if (match := _NAME.fullmatch(folder.name))]
    for log, match in ((path, match) for folder, match in named for path in _entries(folder)):
        if log.match("run-*.wandb") and log.is_file() and not log.is_symlink():
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
