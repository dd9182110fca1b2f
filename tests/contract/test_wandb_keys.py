"""`ddptrain results sync` of a run of another user: the key goes to no server that the run's own files name."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished
from tests.servers.wandb_backend import API_KEY, Backend, wandb_backend


@pytest.fixture
def own() -> Iterator[Backend]:
    with wandb_backend() as made:
        yield made


@pytest.fixture
def foreign() -> Iterator[Backend]:
    with wandb_backend() as made:
        yield made
    assert (made.keys, made.asked) == (set(), []), "nothing at all has come to the other user's server"


_RECORD = """
import sys, wandb
settings = wandb.Settings(mode="offline", base_url=sys.argv[2], console="off", silent=True, x_disable_stats=True)
run = wandb.init(id="w1", project="petnames", dir=sys.argv[1], config={"base_url": sys.argv[2]}, settings=settings)
run.log({"loss": 1.0})
run.finish()
"""


@functools.cache
def recorded(server: str) -> bytes:
    """A log that wandb has recorded offline, and which names `server`."""
    with tempfile.TemporaryDirectory() as folder:
        outside = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        subprocess.run([sys.executable, "-c", _RECORD, folder, server], env=outside, check=True, timeout=100)
        (log,) = Path(folder).glob("wandb/offline-run-*/run-w1.wandb")
        return log.read_bytes()


def attack(folder: Path, server: str) -> Path:
    """A run that was recorded offline, and each of whose files names `server`; its folder."""
    run = folder / "runs" / "a-run"
    part = run / "tracking/wandb/offline-run-20240101_000000-w1"
    (part / "files").mkdir(parents=True)
    (part / "run-w1.wandb").write_bytes(recorded(server))
    lines = "\n".join(f"{name} = {server}" for name in ("base_url", "http_proxy", "https_proxy"))
    for place in (run, run / "tracking", part, part / "files"):
        (place / "wandb").mkdir(exist_ok=True)
        for file in (place / "wandb/settings", place / "settings"):
            file.write_text(f"[default]\n{lines}\n")
        (place / "wandb/__main__.py").write_text(f"raise SystemExit('{place} was executed')")
    tracking = {"wandb": {"id": "w1", "mode": "offline", "project": "petnames", "base_url": server}}
    record = {"run_id": "a-run", "name": "petnames", "workload": "petnames", "status": "succeeded", "exit_code": 0}
    (run / "run.json").write_text(json.dumps({**record, "started_at": "2026-01-01T00:00:00Z", "tracking": tracking}))
    return run


def user(home: Path, **environ: str) -> dict[str, str]:
    """The environment of a user, without the W&B of the one who runs the tests."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home.mkdir(exist_ok=True)
    return {
        **outside,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "NETRC": str(home / ".netrc"),
        **environ,
    }


@pytest.mark.parametrize(
    "chosen",
    [
        "key alone",
        pytest.param("settings", marks=pytest.mark.long),
        "netrc",
        pytest.param("default of netrc", marks=pytest.mark.long),
    ],
)
def test_key_is_not_sent_to_a_server_that_only_the_run_names(
    chosen: str, tmp_path: Path, own: Backend, foreign: Backend, run_cli: Cli
) -> None:
    run = attack(tmp_path, foreign.url)
    home = tmp_path / "home"
    env = user(home, **({"WANDB_API_KEY": API_KEY} if chosen in ("key alone", "settings") else {}))
    if chosen == "settings":
        (home / ".config/wandb").mkdir(parents=True)
        (home / ".config/wandb/settings").write_text(f"[default]\nbase_url = {own.url}\n")
    machine = {"netrc": "machine api.wandb.ai", "default of netrc": "default"}.get(chosen)
    (home / ".netrc").write_text(f"{machine} login user password {API_KEY}\n" if machine else "")
    what = str(run)
    ended = run_cli("results", "sync", what, env=env)
    assert ended.rc == 4
    assert f"they are for {foreign.url}: set WANDB_BASE_URL={foreign.url} if your key is to go there" in ended.stdout
    assert own.asked == []


def sync(run_cli: Cli, run: Path, environ: dict[str, str], cwd: Path | None = None) -> Finished:
    return run_cli("results", "sync", run, env={"WANDB_API_KEY": "", **environ}, cwd=cwd)


@pytest.mark.parametrize(
    "inside",
    [
        ".",
        pytest.param("tracking", marks=pytest.mark.long),
        pytest.param("tracking/wandb/offline-run-20240101_000000-w1/files", marks=pytest.mark.long),
    ],
)
def test_settings_and_modules_in_the_run_directory_are_not_read(
    inside: str, tmp_path: Path, own: Backend, foreign: Backend, run_cli: Cli
) -> None:
    run = attack(tmp_path, foreign.url)
    ended = sync(run_cli, run, user(tmp_path / "home", **own.environment), cwd=run / inside)
    assert (ended.stdout, own.keys) == ("a-run: 1 sent to W&B\n", {API_KEY}), ended
    assert [row["loss"] for row in own.run.history] == [1.0]


def test_server_of_netrc_gets_its_own_key(tmp_path: Path, own: Backend, run_cli: Cli) -> None:
    run = attack(tmp_path, own.url)
    environ = user(tmp_path / "home")
    Path(environ["NETRC"]).write_text(f"machine {own.url.removeprefix('http://')} login user password {API_KEY}\n")
    assert (sync(run_cli, run, environ).stdout, own.keys) == ("a-run: 1 sent to W&B\n", {API_KEY})


@pytest.mark.long
def test_cause_is_shown_of_a_key_that_wandb_refuses(tmp_path: Path, own: Backend, run_cli: Cli) -> None:
    run = attack(tmp_path, own.url)
    ended = sync(run_cli, run, user(tmp_path / "home", **own.environment | {"WANDB_API_KEY": "short"}))
    assert "WANDB_API_KEY invalid: API key must have 40+ characters, has 5." in ended.stdout
    own.fault = "unauthorized"
    assert "it is unauthorized" in sync(run_cli, run, user(tmp_path / "home", **own.environment)).stdout
