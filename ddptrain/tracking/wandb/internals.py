"""All uses of private parts of wandb.

tests/unit/tracking/wandb/test_internals.py fails if a new version of wandb has changed one, and says what to check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import wandb

# Called when wandb has accepted an artifact; the second argument is the handle for when_answered().
ArtifactAccepted = Callable[["wandb.Artifact", Any], None]


def skip_server_requests(run: wandb.Run, accepted: ArtifactAccepted) -> None:
    """Make run.log_artifact() work without a request to the server.

    wandb asks the server whether the artifact's type is right, and would wait for an unreachable server. For this
    request it also creates a public API object, which imports half of wandb.
    """

    class NoApi:
        def _set_artifact_save_handle(self, artifact: wandb.Artifact, handle: object) -> None:
            accepted(artifact, handle)  # wandb stores the handle for artifact.wait(), which ddptrain does not call

    vars(run)["_assert_can_log_artifact"] = lambda artifact: None
    vars(run)["_public_api"] = lambda overrides=None: NoApi()


def when_answered(handle: Any, answered: Callable[[str], None]) -> None:
    """Call `answered` in wandb's thread with the server's error message, or "", once an upload has ended.

    wandb itself does not report an artifact that the server refuses.
    """

    async def wait() -> None:
        answer = await handle.wait_async(timeout=None)  # raises if the run is abandoned; finish() reports that
        answered(str(answer.response.log_artifact_response.error_message))

    with suppress(Exception):  # an untested version of wandb: then nothing is known about uploads
        handle.asyncer.run_soon(wait, daemon=True)


def remove_exit_handler() -> None:
    """Start wandb's service process, and remove the exit handler that wandb registers for it.

    The handler would wait for an unreachable server, and report a run that is just being opened as finished. wandb's
    sys.exit and sys.excepthook, which only give this handler an exit code, are replaced by the earlier ones.
    """
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib.exit_hooks import ExitHooks

    with suppress(Exception):  # an untested version of wandb: then only the exit of a broken run takes longer
        connection: Any = wandb_setup.singleton().ensure_service()
        connection._cleanup()  # noqa: SLF001  # there is no public function
    hooks: Any = getattr(sys.excepthook, "__self__", None)
    if isinstance(hooks, ExitHooks):
        sys.exit = hooks._orig_exit  # noqa: SLF001
        sys.excepthook = hooks._orig_excepthook or sys.__excepthook__  # noqa: SLF001


def parse_record(data: bytes) -> Any:
    """Return a record of a transaction log, as wandb's protobuf message `Record`."""
    from wandb.proto import wandb_internal_pb2

    return wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]  # protobuf creates the class at import
