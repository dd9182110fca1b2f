"""What the driver sets up for trackers, and what it sends to W&B afterwards."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.config.resolved import resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.errors import UsageError
from ddptrain.protocol.events import Tracked
from ddptrain.protocol.rank_spec import Placement
from ddptrain.results.layout import Origin
from ddptrain.results.run import Run
from ddptrain.results.run_record import DriverRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.tracking.wandb_files import find_access

# --- What ranks are told for their trackers, and where W&B's key is looked for ---


KEY = "k" * 40


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def netrc(home: Mapping[str, str], host: str, name: str = ".netrc") -> Path:
    path = Path(home["HOME"]) / name
    path.write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    return path


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_key_of_netrc_is_found_for_the_public_service(home: dict[str, str], host: str) -> None:
    netrc(home, host)
    assert find_access(home).key == KEY


def test_key_of_netrc_is_that_of_the_servers_host(home: dict[str, str]) -> None:
    netrc(home, "wandb.example.org:8443")
    assert find_access({**home, "WANDB_BASE_URL": "https://wandb.example.org:8443"}).key == KEY
    assert find_access({**home, "WANDB_BASE_URL": "https://other.example.org"}).key == ""
    assert find_access(home).key == ""


def test_netrc_may_be_another_file_and_may_be_damaged(home: dict[str, str]) -> None:
    path = netrc(home, "api.wandb.ai", "elsewhere")
    assert find_access({**home, "NETRC": str(path)}).key == KEY
    path.write_text("machine\x00 {")
    assert not find_access({**home, "NETRC": str(path)}).has_credentials


def test_settings_file_of_wandb_is_read(home: dict[str, str]) -> None:
    folder = Path(home["HOME"]) / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:1\nmode = offline\n")
    access = find_access(home)
    assert (access.base_url, access.mode, access.has_credentials) == ("http://127.0.0.1:1", "offline", False)


# --- what ranks are told ---

Make = Callable[..., tuple[TrackingSetup, list[str]]]


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with RunWriter.create(tmp_path / "runs", "a-run", "petnames", "", "petnames") as made:
        yield made


@pytest.fixture
def make(writer: RunWriter, home: dict[str, str]) -> Make:
    def made(environ: Mapping[str, str], *, cluster: Mapping[str, Any] | None = None, **wandb: Any) -> Any:
        config = {"workload": "petnames", "tracking": {"wandb": wandb}, "cluster": cluster or {}}
        config["env"] = {"PASSWORD": "wh1sper"}
        said: list[str] = []
        return TrackingSetup(
            resolve(RunConfig.model_validate(config), Path("c.yaml")), writer, {**home, **environ}, said.append
        ), said

    return made


def place(rank: int, *, shared: bool = True) -> RankPlace:
    slot = Slot("tcp://w", "127.0.0.1", 0, counted=True, gpu=False)
    return RankPlace(rank, Placement(2, rank, 2, 0, 0, shared=shared), slot, "host", Path("/"))


def told(tracking: TrackingSetup, rank: int = 0) -> dict[str, Any]:
    spec = tracking.of(place(rank))
    assert spec is not None
    (tracker,) = spec.trackers
    return dict(tracker.from_driver)


def test_ranks_of_a_run_without_trackers_are_told_nothing(make: Make) -> None:
    tracking, said = make({"WANDB_API_KEY": KEY}, mode="off")
    assert (tracking.of(place(0)), tracking.env, said) == (None, {}, [])


def test_run_with_a_key_is_online(make: Make, writer: RunWriter) -> None:
    tracking, said = make({"WANDB_API_KEY": KEY}, mode="rank0")
    about = told(tracking)
    assert (about["mode"], about["online"], said) == ("rank0", True, [])
    assert about["id"] == writer.record.tracking["wandb"]["id"]
    assert tracking.of(place(1)) is None
    assert tracking.env["WANDB_API_KEY"] == KEY
    assert KEY not in repr(tracking.of(place(0))) + writer.layout.run_json.read_text() + repr(tracking)
    assert "wh1sper" not in repr(tracking.of(place(0)))
    here, elsewhere = tracking.of(place(0)), tracking.of(place(0, shared=False))
    assert here is not None and here.folder == str(writer.layout.root / "tracking")
    assert elsewhere is not None and elsewhere.folder == ""


def test_rank_does_not_say_which_server_gets_the_key_later(make: Make, writer: RunWriter) -> None:
    make({"WANDB_BASE_URL": "https://wandb.example.org"}, mode="rank0")
    Recorder(writer).rank_event(0, Tracked(1, "wandb", {"base_url": "http://evil", "url": "u"}))
    kept = writer.record.tracking["wandb"]
    assert (kept["base_url"], kept["url"]) == ("https://wandb.example.org", "u")


def test_run_without_a_key_is_offline_and_that_is_said_once(make: Make, writer: RunWriter) -> None:
    tracking, said = make({}, mode="process")
    assert told(tracking, 1)["online"] is False
    (line,) = said
    assert "no API key" in line
    assert f"`ddptrain results sync {writer.layout.root}` sends it later" in line, "it is not in ./runs"


def test_run_where_commands_look_is_called_by_its_id_and_one_in_a_store_by_its_address(
    make: Make, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(writer.layout.root.parents[1])
    tracking, (line,) = make({}, mode="rank0")
    assert "`ddptrain results sync a-run` sends it later" in line
    assert told(tracking)["sync_command"] == "ddptrain results sync a-run"
    Origin("s3://bucket/my runs/a-run").mark(writer.layout.root)
    _, (line,) = make({}, mode="rank0")
    assert "`ddptrain results sync 's3://bucket/my runs/a-run'` sends it later" in line


def test_shared_run_without_a_key_is_a_run_a_rank(make: Make) -> None:
    tracking, (line,) = make({}, mode="shared")
    assert told(tracking, 1)["mode"] == "process"
    assert "one run for each rank" in line


@pytest.mark.parametrize(
    ("wish", "mode", "online"), [("offline", "rank0", False), ("online", "rank0", True), ("shared", "shared", True)]
)
def test_wandb_mode_wins(make: Make, wish: str, mode: str, online: bool) -> None:
    tracking, _ = make({"WANDB_API_KEY": KEY, "WANDB_MODE": wish}, mode="rank0")
    assert (told(tracking)["mode"], told(tracking)["online"]) == (mode, online)


def test_wandb_mode_of_the_configuration_comes_before_that_of_the_shell(
    writer: RunWriter, home: dict[str, str]
) -> None:
    config = {"workload": "petnames", "tracking": {"wandb": True}, "env": {"WANDB_MODE": "dryrun"}}
    environ = {**home, "WANDB_MODE": "online", "WANDB_API_KEY": KEY}
    said: list[str] = []
    tracking = TrackingSetup(resolve(RunConfig.model_validate(config), Path("c.yaml")), writer, environ, said.append)
    assert told(tracking)["online"] is False
    assert "WANDB_MODE is dryrun" in said[0]


def test_wandb_that_is_disabled_is_off(make: Make) -> None:
    tracking, (line,) = make({"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, mode="process")
    assert tracking.of(place(0)) is None
    assert "WANDB_MODE" in line


def test_variables_go_along_to_other_clusters_less_those_of_this_machine(make: Make) -> None:
    environ = {"WANDB_API_KEY": KEY, "WANDB_PROJECT": "p", "WANDB_DIR": "/here", "WANDB_SERVICE": "2-1"}
    tracking, _ = make(environ, cluster={"address": "tcp://127.0.0.1:1"}, mode="rank0")
    assert tracking.env == {"WANDB_API_KEY": KEY, "WANDB_PROJECT": "p"}


# --- Which runs `results sync` leaves alone: those of a living driver, wherever it is, and those of other users ---


@pytest.fixture
def layout(tmp_path: Path) -> Run:
    """A run that W&B has recorded offline; run.json says that a driver on another host runs it, silent for an hour."""
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        part = writer.layout.tracking_dir / "wandb" / "offline-run-20250101_000000-w1"
        part.mkdir(parents=True)
        (part / "run-w1.wandb").write_bytes(b"recorded")
        writer.update(tracking={"wandb": {"id": "w1", "mode": "offline"}})
        writer.finish(RunStatus.SUCCEEDED, 0)
    driver = DriverRecord(1, "another-host", "another-boot")
    record = dataclasses.replace(writer.record, status=RunStatus.RUNNING, driver=driver)
    writer.layout.run_json.write_text(record.to_json())
    for path in writer.layout.root.iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return writer.layout


@pytest.fixture
def home_wandb_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key of W&B's."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sync(layout: Run) -> SyncResult:
    return sync_run(Run(layout.root), {"HOME": os.environ["HOME"]}, time.monotonic() + 60)


def test_run_of_another_host_is_left_alone_while_its_heart_beats_however_little_it_logs(layout: Run) -> None:
    layout.lock_file.touch()
    assert sync(layout).skipped == "it is running"


@pytest.mark.usefixtures("home_wandb_sync")
def test_run_of_another_host_whose_heart_has_stopped_is_sent(layout: Run) -> None:
    layout.lock_file.touch()
    os.utime(layout.lock_file, (1, 1))
    with pytest.raises(UsageError, match="there is no API key"):
        sync(layout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_run_of_another_user_is_left_alone(layout: Run) -> None:
    os.chown(layout.root, 65534, 65534)
    assert sync(layout).skipped == "it belongs to another user"
    assert not (layout.tracking_dir / "wandb" / ".sync.lock").exists()


@pytest.mark.usefixtures("home_wandb_sync")
def test_lock_of_a_sync_is_not_taken_through_a_link(layout: Run, tmp_path: Path) -> None:
    record = dataclasses.replace(Run(layout.root).record, status=RunStatus.SUCCEEDED, failure=None)
    layout.run_json.write_text(record.to_json())
    (tmp_path / "precious").write_text("precious\n")
    (layout.tracking_dir / "wandb" / ".sync.lock").symlink_to(tmp_path / "precious")
    environ = {"HOME": os.environ["HOME"], "WANDB_API_KEY": "0" * 40}
    sent = sync_run(Run(layout.root), environ, time.monotonic() + 60)
    assert ".sync.lock" in sent.problem and sent.waiting == 1
    assert (tmp_path / "precious").read_text() == "precious\n"


@pytest.mark.usefixtures("home_wandb_sync")
def test_error_of_wandb_is_shown_without_the_key(layout: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(Run(layout.root).record, status=RunStatus.SUCCEEDED, failure=None)
    layout.run_json.write_text(record.to_json())
    program = tmp_path / "program"  # runs in place of `python -P -m wandb sync`
    program.write_text(
        "#!/bin/sh\necho '2025-01-01 ERROR first'\n"
        f"echo 'wandb: ERROR key {KEY} refused by http://me:hush@there/'\n"
        "echo 'wandb: ERROR Find detailed error logs at: /tmp/x'\n"
        f"env > {tmp_path}/environment\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    environ = {"HOME": os.environ["HOME"], "WANDB_API_KEY": KEY, "WANDB_MODE": "offline", "WANDB_RUN_ID": "x"}
    sent = sync_run(Run(layout.root), environ, time.monotonic() + 60)
    assert sent.problem == "key <left out> refused by http://<left out>@there/"
    given = (tmp_path / "environment").read_text()
    assert f"WANDB_API_KEY={KEY}" in given and "WANDB_MODE" not in given, "it says how to send, not how to record"
