"""What every test gets: a check for what it leaves behind, the command `ddptrain`, and a cluster to share."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import leaks, nightly, skips
from tests.support.command import PATIENCE_S, Cli, Finished, Running

__all__ = ["PATIENCE_S", "Cli", "Finished", "Running"]


def pytest_configure(config: pytest.Config) -> None:
    os.environ[leaks.MARK] = uuid.uuid4().hex
    if not hasattr(config, "workerinput"):  # the test processes inherit the environment of this one
        _use_own_temp_folder(config)
    # Hundreds of processes import ddptrain: without cached bytecode each compiles it again, for 0.2 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Searching for garbage each 700 objects, the default, takes a tenth of the CPU time of the unit tests.
    gc.set_threshold(50_000)
    # pytest keeps the test files that it has rewritten: 10 s of CPU time in each process.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONUNBUFFERED", None)  # some containers set it
    for name in (
        "CI",
        "GITHUB_ACTIONS",
        "GITLAB_CI",
        "DDPTRAIN_CI",
    ):  # where this suite runs must not change what it sees
        os.environ.pop(name, None)
    # A shell's `&` ignores SIGINT and SIGQUIT, nohup ignores SIGHUP, and children would inherit it. A handler they do
    # not inherit.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _use_own_temp_folder(config: pytest.Config) -> None:
    """Have all processes put their temporary files into one folder, which is deleted at the end of the suite.

    Killed processes and test servers leave files behind. pytest's own folders, which have longer paths, stay where they
    are: a socket's path may have 107 bytes.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="ddptest-", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o755)  # other users may go through it, as through /tmp
    before = os.environ.get("TMPDIR")

    def delete() -> None:
        folder.cleanup()
        tempfile.tempdir = None
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)

    os.environ["TMPDIR"], tempfile.tempdir = folder.name, None
    config.add_cleanup(delete)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each test process begin with another file: it finds the others rewritten, by the other processes."""
    report = yield
    if isinstance(collector, pytest.Directory) and hasattr(collector.config, "workerinput"):
        told = collector.config.workerinput
        first = len(report.result) * int(told["workerid"].removeprefix("gw")) // told["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make nightly` runs. Slow files are first: the last ones would keep one process busy.

    All test processes must have the same order.
    """
    for item in items:
        if item.path.relative_to(item.config.rootpath).as_posix() in nightly.FILES:
            item.add_marker(pytest.mark.long)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path))


def pytest_collection_finish() -> None:
    """Spare the modules and the thousands of tests each search for garbage, which costs 0.3 s of CPU time with them."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of the process all objects must go, or nanobind reports those of triton as leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With DDPTRAIN_STRICT_SKIPS set, a test that is skipped for a reason that is not allowed fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("DDPTRAIN_STRICT_SKIPS") or reporter is None:
        return
    if found := skips.forbidden({str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}):
        reporter.write_line("")
        reporter.section("these tests must not be skipped here")
        reporter.write_line("\n".join(found))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@cache
def _why_no_gpu() -> str:
    """Why tests marked gpu can't run; empty if they can."""
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA GPU: nvidia-smi is not installed"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    if listed.returncode or "GPU " not in listed.stdout:
        return f"no NVIDIA GPU: nvidia-smi -L says {(listed.stdout + listed.stderr).strip()!r}"
    return ""


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fails a test that leaves processes or threads running, or the environment changed."""
    before = leaks.Snapshot()
    yield
    if left := before.leaks():
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def run_cli(tmp_path: Path) -> Iterator[Cli]:
    """Runs `ddptrain` in tmp_path: `run_cli("schema")` to its end, `run_cli.start("train")` to be watched."""
    runner = Cli(tmp_path)
    yield runner
    for running in runner.started:
        # What outlives a command that has ended by itself is reported by leak_guard.
        if running.popen.poll() is None:
            running.kill_group()


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster with six CPU slots, and the environment in which commands find its certificate.

    A run on it takes a third of what one takes that starts its own. Its workers have the environment of pytest, not
    that of the command: what ranks are to see goes into the configuration's `env`. The cluster must be free in the end.
    """
    cli = Cli(tmp_path_factory.mktemp("cluster"))
    # No cluster outlives the tests, even if their process is killed.
    options = ("--name", "shared", "--ranks", "6", "--gpus", "0", "--idle-timeout", "600", "--json")
    up = cli("cluster", "up", *options, "--set", "cluster.start_timeout_s=200", timeout_s=220)
    assert up.rc == 0, up.stderr
    folder = cli.folder / ".state" / "ddptrain" / "clusters" / "shared"
    files = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}
    tls = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(folder / file) for name, file in files.items()}
    yield json.loads(up.stdout)["address"], tls
    status = json.loads(cli("cluster", "status", "shared", "--json").stdout)
    assert cli("cluster", "down", "shared", "--now").rc == 0
    assert not status["runs"], status


@pytest.fixture
def shared_cluster(running_cluster: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the running cluster, for runs of tests that are not about their cluster."""
    address, tls = running_cluster
    for name, value in tls.items():
        monkeypatch.setenv(name, value)
    return address


@pytest.fixture
def warm_cluster(shared_cluster: str) -> str:
    return shared_cluster
