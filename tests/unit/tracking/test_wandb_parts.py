"""The private parts of wandb that are used: where one has changed, the failure says what breaks, and what to check."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import requires
from typing import Any

import pytest
import wandb
from packaging.requirements import Requirement
from packaging.version import Version
from wandb.proto import wandb_internal_pb2
from wandb.sdk.lib.service.service_connection import ServiceConnection
from wandb.sdk.mailbox.mailbox_handle import MailboxHandle
from wandb.sdk.wandb_setup import _WandbSetup

FAULTS = "tests/integration/test_wandb_faults.py"
SYNC = "tests/integration/test_wandb_sync.py"
LOG = "results sync reads and rewrites logs by these names: see results/wandblog.py, then run " + SYNC
ARTIFACTS = (
    "log_artifact would ask the server for the artifact's type, and wait for one that is gone: see _never_ask in "
    f"tracking/wandb_session.py, then run {FAULTS}"
)
UPLOADS = (
    "what W&B lacks of artifacts would not be told: see _never_ask in tracking/wandb_session.py and "
    "tracking/wandb_uploads.py, then run tests/integration/test_wandb_media.py"
)
EXIT = (
    "wandb's exit handler would wait for a server that is gone: see _no_exit_handler in tracking/wandb_session.py, "
    f"then run {FAULTS}"
)


def fields(name: str) -> list[str]:
    found: Any = getattr(wandb_internal_pb2, name).DESCRIPTOR
    return sorted(found.fields_by_name)


# Where to look (a class or function, whose source is read; or names), what must be found there, and what breaks else.
PARTS: dict[str, tuple[Any, str, str]] = {
    "log_artifact asks": (wandb.Run._log_artifact, r"self\._assert_can_log_artifact\(artifact\)", ARTIFACTS),
    "it asks through": (wandb.Run._assert_can_log_artifact, r"self\._public_api\(\)", ARTIFACTS),
    "log_artifact gives away its handle": (
        wandb.Run._log_artifact,
        r"self\._public_api\(\)\._set_artifact_save_handle\(artifact, handle\)",
        UPLOADS,
    ),
    "a handle can be awaited": (MailboxHandle, r"async def wait_async\(self, \*, timeout: float \| None\)", UPLOADS),
    "a handle has its loop": (MailboxHandle, r"@property\n    def asyncer\(self\)", UPLOADS),
    "an answer has an error": (fields("LogArtifactResponse"), r"\berror_message\b", UPLOADS),
    "the service is started": (_WandbSetup, r"def ensure_service\(self\)", EXIT),
    "its exit handler can be taken back": (ServiceConnection.teardown, r"self\._cleanup\(\)", EXIT),
    "a record is of one kind": (fields("Record"), r"artifact.+exit.+history.+\brun\b", LOG),
    "a run has a name": (fields("RunRecord"), r"display_name.+run_group.+run_id", LOG),
    "an exit has a code": (fields("RunExitRecord"), r"exit_code", LOG),
    "an artifact has a list of files": (fields("ArtifactManifest"), r"contents.+manifest_file_path", LOG),
    "a file has a place": (fields("ArtifactManifestEntry"), r"digest.+extra.+local_path", LOG),
}


def lacks(where: Any, pattern: str) -> bool:
    text = " ".join(where) if isinstance(where, list) else inspect.getsource(where)
    return re.search(pattern, text) is None


@pytest.mark.parametrize("part", PARTS)
def test_private_part_of_wandb_is_as_it_was(part: str) -> None:
    where, pattern, breaks = PARTS[part]
    name = where[:3] if isinstance(where, list) else where.__qualname__
    assert not lacks(where, pattern), f"wandb {wandb.__version__}: {name} has no {pattern}; {breaks}"


def test_part_that_has_changed_is_found() -> None:
    assert lacks(wandb.Run.finish, r"self\._assert_can_log_artifact\(artifact\)")
    assert lacks(["step", "epoch"], "local_path")


def test_only_series_of_wandb_that_were_tried_are_allowed() -> None:
    (bound,) = [each for each in map(Requirement, requires("ddptrain") or ()) if each.name == "wandb"]
    tried = Version(wandb.__version__)
    assert tried in bound.specifier
    untried = f"{tried.major}.{tried.minor + 1}"
    assert untried not in bound.specifier, (
        f"try wandb {untried} first: run {__file__} and tests/integration/test_wandb*.py"
    )
