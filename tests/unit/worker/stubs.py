"""Real rank servers whose ranks run a few lines of Python instead of torch: they start within 0.1 s."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ddptrain.worker.rank_server_client import RankServerClient
from tests.support.command import wait_until
from tests.unit.specs import make_spec

_SITE = """
import sys, types
warmup = types.ModuleType("ddptrain.rank.warmup")
warmup.import_everything = lambda: exec({at_import!r})
process = types.ModuleType("ddptrain.rank.lifecycle")
def run_rank(spec, log_fd, events_fd, orders_fd):
    import os
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.environ.clear()
    os.environ.update(spec.env)
    exec(spec.code.params["code"], {{"spec": spec, "say": lambda *words: print(*words, flush=True)}})
    sys.stdout.flush()
    return 0
process.run_rank = run_rank
sys.modules["ddptrain.rank.warmup"], sys.modules["ddptrain.rank.lifecycle"] = warmup, process
"""


class Bench:
    """A folder for rank servers with stub ranks. A rank runs a piece of code, and its output goes to a file."""

    def __init__(self, folder: Path, at_import: str = "") -> None:
        """Servers run `at_import` instead of importing torch."""
        self.folder = folder
        site = folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(_SITE.format(at_import=at_import))
        self.env = {**os.environ, "PYTHONPATH": str(site)}

    @contextlib.contextmanager
    def server(self) -> Iterator[RankServerClient]:
        """A rank server. It and its ranks have ended afterwards."""
        server = RankServerClient(self.env, self.folder / "server.log")
        server.listen()
        try:
            yield server
        finally:
            server.close()
            assert server.wait(60)

    def order(self, server: RankServerClient, rank_id: str, code: str, slot: str | None = None) -> None:
        """Start a rank that runs `code`."""
        spec = make_spec(params={"code": textwrap.dedent(code)}, env=self.env)
        fd = os.open(self.log(rank_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            server.start_rank(rank_id, spec.to_json(), fd, fd, slot if slot is not None else rank_id)
        finally:
            os.close(fd)

    def log(self, rank_id: str) -> Path:
        """The file with the output of the rank."""
        return self.folder / f"{rank_id}.log"

    def said(self, rank_id: str) -> str:
        """The output of the rank so far."""
        return self.log(rank_id).read_text()

    def wait_for(self, rank_id: str, words: str) -> None:
        """Wait until the rank has printed `words`."""
        wait_until(lambda: words in self.said(rank_id), f"{rank_id} prints {words!r}")


def status(server: RankServerClient, rank_id: str, timeout_s: float = 60.0) -> int:
    """Wait for the rank's end. Returns its exit status."""
    deadline = time.monotonic() + timeout_s
    while (report := server.exit_of(rank_id)) is None:
        time.sleep(0.02)
        assert time.monotonic() < deadline, f"{rank_id} has not ended within {timeout_s} s"
    return int(report["status"])


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; its parent may not know yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has just ended
        return True


def has_ended(pid: int) -> bool:
    """Whether the process with this pid has ended; its parent may not know yet."""
    try:
        return is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
