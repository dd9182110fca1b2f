"""The parts of a W&B run on the disk: wandb creates a new folder, a part of the run, each time it opens the run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.file_ops import entries

LINKS = "links.json"  # a file beside the parts: the URLs of the runs that `results sync` has sent, by their ids
UNSENT = "unsent"  # a file in the folder of a part; its text is OPEN, SENT or ""
OPEN = "open"  # the run has not ended, or was killed
SENT = "sent"  # the server has everything
SYNCED = ".wandb.synced"  # suffix of a file that wandb creates beside a log that `wandb sync` has sent
SYNC_STATE = ".wandb.syncstate"  # suffix of a file with the step numbers of a log that was sent partly
STATE_FILES = (f"/{UNSENT}", SYNCED, SYNC_STATE)  # suffixes of the paths of files that show whether a part was sent
SENDING = "sending-rank-"  # prefix of a folder beside the parts: checkpoints that are being sent
_NAME = re.compile(r"(?P<offline>offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_EMPTY_BYTES = 7  # the header of a log
_SHARED = re.compile(r"-(?P<rank>rank_\d+)")


@dataclass(frozen=True, slots=True)
class RunPart:
    """A part of a run: its folder, and the transaction log with everything that was logged."""

    folder: Path
    log: Path
    run_id: str  # in W&B; several parts may continue one run
    began: str
    offline: bool
    rank: str = ""  # the rank that wrote the part, such as rank_1, if ranks share the run

    @property
    def target(self) -> str:
        """The id of the W&B run that the part is sent to.

        A rank's part of a shared run becomes a run of its own: the rows of all ranks have the same step numbers, and
        the server would mix them up.
        """
        return f"{self.run_id}-{self.rank}" if self.rank else self.run_id

    @property
    def sent(self) -> bool:
        """Whether the server has everything."""
        mark = self.mark
        return self.log.with_suffix(SYNCED).exists() or mark == SENT or (mark is None and not self.offline)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send: the process was killed before anything was written."""
        return self.log.stat().st_size <= _EMPTY_BYTES

    @property
    def mark(self) -> str | None:
        """The text of the file UNSENT; None if it does not exist."""
        try:
            return (self.folder / UNSENT).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def unsent_parts(parts: Sequence[RunPart]) -> list[RunPart]:
    """Return the parts to send.

    A killed online part that a later online part has continued is left out: its rows would be sent twice.
    """
    unsent = (part for part in parts if not part.sent)
    return [part for part in unsent if part.offline or part.mark != OPEN or not _was_continued(part, parts)]


def _was_continued(part: RunPart, parts: Sequence[RunPart]) -> bool:
    of_run = [each for each in parts if each.target == part.target]
    return any(each.sent for each in of_run[of_run.index(part) + 1 :])


def parts_below(folder: Path) -> list[RunPart]:
    """Return the parts in `folder` and in its subfolders, oldest first."""
    outer = entries(folder)
    return _parts([*outer, *(inner for each in outer for inner in entries(each))])


def parts_in(folder: Path) -> list[RunPart]:
    """Return the parts that are direct subfolders of `folder`, oldest first; [] if it cannot be read."""
    return _parts(entries(folder))


def _parts(folders: Sequence[Path]) -> list[RunPart]:
    parts = []
    named = [(folder, match) for folder in folders if (match := _NAME.fullmatch(folder.name))]
    for log, match in ((path, match) for folder, match in named for path in entries(folder)):
        if log.match("run-*.wandb") and log.is_file() and not log.is_symlink():
            run_id = log.stem.removeprefix("run-")
            shared = _SHARED.fullmatch(match["id"].removeprefix(run_id))
            rank = shared["rank"] if shared else ""
            parts.append(RunPart(log.parent, log, run_id, match["time"], match["offline"] is not None, rank))
    return sorted(parts, key=lambda part: (part.began, part.folder.name))


def links_in(folder: Path) -> dict[str, str]:
    """Return the content of the file LINKS in a folder; {} if there is none."""
    try:
        return links_of((folder / LINKS).read_bytes())
    except OSError:
        return {}


def links_of(data: bytes) -> dict[str, str]:
    """Return the content of a file LINKS; {} for other data."""
    try:
        return {str(run_id): str(url) for run_id, url in json.loads(data).items()}
    except (ValueError, AttributeError):
        return {}
