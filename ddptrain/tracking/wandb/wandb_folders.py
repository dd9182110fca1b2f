"""The parts of a W&B run on the disk. wandb creates a folder each time it opens a run: each is a part of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.file_ops import entries

LINKS = "links.json"  # beside the parts: URLs of the runs that were sent by `results sync`, by their ids
UNSENT = "unsent"  # a file in the folder of an online run; its text is OPEN, SENT or ""
OPEN = "open"  # the run has not ended, or was killed
SENT = "sent"  # the server has everything; the file stays, because nothing is deleted in an object store
SYNCED = ".wandb.synced"  # suffix of a file that wandb creates beside a log that `wandb sync` has sent
SYNC_STATE = ".wandb.syncstate"  # suffix of a file with which a log that was sent in part keeps its step numbers
STATE_FILES = (f"/{UNSENT}", SYNCED, SYNC_STATE)  # ends of the paths of files that tell whether a part was sent
SENDING = "sending-rank-"  # prefix of a folder beside the parts: checkpoints that are being sent
CHECKPOINT_TYPE = "model"  # type of artifacts that are checkpoints
_NAME = re.compile(r"(?P<offline>offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_SHARED = re.compile(r"-(?P<rank>rank_\d+)")


@dataclass(frozen=True, slots=True)
class RunPart:
    """One of these folders; `log` is the transaction log, with everything that was logged."""

    folder: Path
    log: Path
    run_id: str  # in W&B; several parts may continue one run
    began: str
    offline: bool
    rank: str = ""  # such as rank_1: the part of this rank, of a run that ranks share

    @property
    def target(self) -> str:
        """The id of the run that it is sent to.

        A rank's part of a shared run becomes a run of its own: the rows of all ranks have the same step numbers, and
        the server would mix them up.
        """
        return f"{self.run_id}-{self.rank}" if self.rank else self.run_id

    @property
    def sent(self) -> bool:
        """Whether the server has everything."""
        if self.log.with_suffix(SYNCED).exists():
            return True
        return not self.offline and self.mark in (None, SENT)

    @property
    def mark(self) -> str | None:
        """The text of the file UNSENT; None if it does not exist."""
        try:
            return (self.folder / UNSENT).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def waiting(parts: Sequence[RunPart]) -> list[RunPart]:
    """The parts to send; not a killed online part that was continued online: its rows would be sent twice."""
    unsent = (part for part in parts if not part.sent)
    return [part for part in unsent if part.offline or part.mark != OPEN or not _was_continued(part, parts)]


def _was_continued(part: RunPart, parts: Sequence[RunPart]) -> bool:
    family = [each for each in parts if each.target == part.target]
    return any(each.sent for each in family[family.index(part) + 1 :])


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The folder of a checkpoint below a run directory, or below another folder with the same layout."""
    return folder / "checkpoints" / f"step-{step}"


def parts_below(folder: Path) -> list[RunPart]:
    """The parts in `folder` and in its subfolders, oldest first."""
    outer = entries(folder)
    return _parts([*outer, *(inner for each in outer for inner in entries(each))])


def parts_in(folder: Path) -> list[RunPart]:
    """The parts in `folder`, oldest first; none if it cannot be read. Looks into no other subfolder."""
    return _parts(entries(folder))


def _parts(folders: Sequence[Path]) -> list[RunPart]:
    found = []
    named = [(folder, match) for folder in folders if (match := _NAME.fullmatch(folder.name))]
    for log, match in ((path, match) for folder, match in named for path in entries(folder)):
        if log.match("run-*.wandb") and log.is_file() and not log.is_symlink():
            run_id = log.stem.removeprefix("run-")
            shared = _SHARED.fullmatch(match["id"].removeprefix(run_id))
            rank = shared["rank"] if shared else ""
            found.append(RunPart(log.parent, log, run_id, match["time"], match["offline"] is not None, rank))
    return sorted(found, key=lambda part: (part.began, part.folder.name))


def links_in(folder: Path) -> dict[str, str]:
    """The content of the file LINKS in a folder; {} if there is none."""
    try:
        known = json.loads((folder / LINKS).read_text(encoding="utf-8"))
        return {str(run_id): str(url) for run_id, url in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}
