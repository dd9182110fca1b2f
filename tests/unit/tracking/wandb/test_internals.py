"""The private parts of wandb that ddptrain uses: a failure says what a new version of wandb breaks, and what to check.

All of them are used in tracking/wandb/internals.py, except for the `x_` settings (tracking/wandb/run.py, rank_run.py)
and the format of the transaction log (tracking/wandb/transaction_log.py).
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from packaging.requirements import Requirement
from packaging.version import Version
from wandb.proto import wandb_internal_pb2
from wandb.sdk.lib.exit_hooks import ExitHooks
from wandb.sdk.lib.service.service_connection import ServiceConnection
from wandb.sdk.mailbox.mailbox_handle import MailboxHandle
from wandb.sdk.wandb_setup import _WandbSetup

import ddptrain
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import internals
from ddptrain.tracking.wandb.rank_run import RankRun
from ddptrain.tracking.wandb.wandb_run import settings_for

INTERNALS = "tracking/wandb/internals.py"
FAULTS = "tests/integration/test_wandb_faults.py"
LOG = (
    "`results sync` reads and rewrites logs by these names: check tracking/wandb/transaction_log.py, then run "
    "tests/integration/test_wandb_sync.py"
)
ARTIFACTS = (
    "log_artifact would ask the server for the artifact's type, and wait for a server that is gone: check "
    f"skip_server_requests in {INTERNALS}, then run {FAULTS}"
)
UPLOADS = (
    "artifacts that the server refuses would not be reported: check skip_server_requests and when_answered in "
    f"{INTERNALS}, then run tests/integration/test_wandb_media.py"
)
EXIT = (
    "wandb's exit handler would wait for a server that is gone: check remove_exit_handler in "
    f"{INTERNALS}, then run {FAULTS}"
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
    "its hooks can be taken back": (
        ExitHooks.hook,
        r"self\._orig_exit = sys\.exit\n.*\n +self\._orig_excepthook = ",
        EXIT,
    ),
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
def test_private_part_of_wandb_is_unchanged(part: str) -> None:
    where, pattern, breaks = PARTS[part]
    name = where[:3] if isinstance(where, list) else where.__qualname__
    assert not lacks(where, pattern), f"wandb {wandb.__version__}: {name} has no {pattern}; {breaks}"


@pytest.mark.parametrize("mode", ["online", "offline", "shared"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_setting_is_known_to_wandb(mode: str, rank: int, tmp_path: Path) -> None:
    facts = Facts("r-1", "pets", 1, rank, 2, rank, 0, 1, tmp_path, from_driver={"mode": "shared", "online": True})
    chosen = settings_for(RankRun({}, facts, {}).run_options(mode), {})
    unknown = chosen.keys() - wandb.Settings.model_fields.keys()
    assert not unknown, (
        f"wandb {wandb.__version__} has no setting {', '.join(sorted(unknown))}: check settings_for in "
        "tracking/wandb/run.py and RankRun in tracking/wandb/rank_run.py, then run tests/integration/test_wandb.py"
    )
    if mode == "shared":
        assert {"x_label", "x_primary", "x_sync_dir_suffix"} <= chosen.keys()


PRIVATE = re.compile(
    r"wandb\.(sdk|proto|errors|util|apis|old|vendor)\b|\brun\._|wandb\._|(_assert|_public_api|_set_artifact)"
)


def test_private_parts_are_used_in_one_file_only() -> None:
    package = Path(ddptrain.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "wandb" in (text := path.read_text(encoding="utf-8")) and PRIVATE.search(text)
    }
    assert users == {INTERNALS}


@pytest.mark.parametrize("users", [False, True])
def test_exit_and_exception_hook_stay_those_of_the_script(monkeypatch: pytest.MonkeyPatch, users: bool) -> None:
    def ensure_service() -> SimpleNamespace:
        ExitHooks().hook()
        return SimpleNamespace(_cleanup=lambda: None)

    service = SimpleNamespace(ensure_service=ensure_service)
    monkeypatch.setattr("wandb.sdk.wandb_setup.singleton", lambda: service)
    monkeypatch.setattr(sys, "excepthook", (lambda *error: None) if users else sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
    before = (sys.exit, sys.excepthook)
    internals.remove_exit_handler()
    assert (sys.exit, sys.excepthook) == before


def test_changed_part_is_found() -> None:
    assert lacks(wandb.Run.finish, r"self\._assert_can_log_artifact\(artifact\)")
    assert lacks(["step", "epoch"], "local_path")


def test_only_tested_minor_versions_of_wandb_are_allowed() -> None:
    (bound,) = [each for each in map(Requirement, requires("ddptrain") or ()) if each.name == "wandb"]
    tried = Version(wandb.__version__)
    assert tried in bound.specifier
    untried = f"{tried.major}.{tried.minor + 1}"
    assert untried not in bound.specifier, (
        f"test wandb {untried} first: run {__file__} and tests/integration/test_wandb*.py, then raise the bound"
    )
