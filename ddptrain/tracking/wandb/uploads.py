"""What becomes of the artifacts of a run that is online: wandb sends them later, one after the other, and says nothing.

It answers for each of them once it is there, or can't be; that is heard in wandb's own thread, and holds nobody up.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import wandb

from ddptrain.redact import hide_credentials

_LONGEST_REASON = 300


@dataclass(slots=True)
class Upload:
    """An artifact that wandb has taken; `artifact` is None once wandb has answered, `refused` is why it is not there.

    `replaced` says that its files are gone, for newer ones.
    """

    artifact: wandb.Artifact | None
    replaced: bool = False
    refused: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the server lacks it, and will."""
        return bool(self.refused) or (self.replaced and self.artifact is not None)


class Uploads:
    """Knows of each artifact whether it is still on its way, and counts what the server lacks."""

    def __init__(self) -> None:
        self._all: list[Upload] = []

    def watch(self, artifact: wandb.Artifact, handle: Any) -> None:
        """wandb has taken an artifact, and will answer through `handle`, which is a private part of it."""
        upload = Upload(artifact)
        self._all.append(upload)

        async def hear() -> None:
            answer = await handle.wait_async(timeout=None)  # raises where the run is given up: of that its end tells
            reason = str(answer.response.log_artifact_response.error_message)
            upload.refused = " ".join(hide_credentials(reason).split())[:_LONGEST_REASON]
            upload.artifact = None

        with suppress(Exception):  # another wandb: nothing is known of it then
            handle.asyncer.run_soon(hear, daemon=True)

    def of(self, artifact: wandb.Artifact) -> Upload | None:
        """An artifact on its way; None once wandb has answered, or where it has not taken it."""
        return next((upload for upload in self._all if upload.artifact is artifact), None)

    @property
    def lacking(self) -> str:
        """What the server lacks, in words; "" where it lacks nothing."""
        lost = [upload for upload in self._all if upload.is_lost]
        replaced = sum(upload.replaced for upload in lost)
        words = []
        if replaced:
            words.append(f"checkpoints ({replaced}) that newer ones had replaced before their turn came")
        if refused := [upload.refused for upload in lost if not upload.replaced]:
            words.append(f"{len(refused)} of {len(self._all)} artifacts, the last for: {refused[-1]}")
        return f"W&B lacks {' and '.join(words)}" if words else ""
