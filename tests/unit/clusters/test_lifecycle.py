"""Starting and ending clusters, with a provider that starts nothing; real ones are in tests/integration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters import cluster_records, lifecycle, processes, status, wait_ready
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.processes import DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.signals import interruptible
from ddptrain.config import plugin_names
from ddptrain.config.sections.clusters import ClusterConfig, SshSettings
from ddptrain.errors import ClusterError, Interrupted, UsageError
from ddptrain.host_identity import HostId, this_host
from tests.unit.worker.stubs import Bench


class Provider:
    """Does what a test tells it to; what it was asked stands in `calls`."""

    tls: bool | None = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.on_scale: Callable[[Deployment, Tell], None] = lambda cluster, tell: None
        self.stuck = ""
        self.written: dict[str, str] = {"scheduler": "", "worker a": ""}
        self.ended: str | None = None

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        self.calls.append("scale")
        self.on_scale(cluster, tell)

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        return self.written

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        self.calls.append("stop")
        if self.stuck:
            raise ClusterError(self.stuck)

    def fault(self, cluster: Deployment) -> str | None:
        return self.ended


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    monkeypatch.setattr(plugin_names, "provider_class", lambda backend: lambda: made)
    return made


def tell(text: str) -> None:
    pass


def up(*, tls: bool | None = None, start_timeout_s: float = 0.2) -> None:
    lifecycle.up(ClusterConfig(start_timeout_s=start_timeout_s), "dev", tell, tls=tls)


def entry(name: str, **fields: str) -> Deployment:
    return cluster_records.create(ClusterRecord(name, "local", "2026-01-01T00:00:00+00:00", **fields))  # type: ignore[arg-type]


def test_record_of_a_cluster_that_is_up_has_its_address_and_dashboard(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready(contextlib.nullcontext[Any]):
        def __init__(self, deployment: Deployment, *others: object) -> None:
            super().__init__(self)
            self.deployment = deployment

        def until_ready(self, slots: int | None) -> status.View:
            return status.View(self.deployment, status.State.UP)

    def start(cluster: Deployment, tell: Tell) -> None:
        said = {"address": "unix:///run/s", "dashboard": "http://127.0.0.1:9"}
        (cluster.folder / "scheduler.json").write_text(json.dumps(said))

    provider.on_scale = start
    monkeypatch.setattr(wait_ready, "ReadinessWait", Ready)
    up()
    [cluster] = cluster_records.every()
    (cluster.folder / "scheduler.json").unlink()
    assert (cluster.record.address, cluster.record.dashboard) == ("unix:///run/s", "http://127.0.0.1:9")


def test_up_without_a_scheduler_quotes_the_logs_and_leaves_nothing(provider: Provider) -> None:
    provider.written = {"scheduler": "Traceback\nboom\n", "worker a": "\n"}
    with pytest.raises(ClusterError) as caught:
        up()
    assert str(caught.value) == ("no scheduler has come up within 0.2 s\nlast lines of scheduler:\n  Traceback\n  boom")
    assert provider.calls == ["scale", "stop"]
    assert cluster_records.every() == []


def test_up_fails_at_once_when_a_process_will_never_join(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_ready, "_FAULT_EVERY_S", 0.0)
    provider.ended = "the worker on a has ended"
    began = time.monotonic()
    with pytest.raises(ClusterError, match="no scheduler has come up: the worker on a has ended"):
        up(start_timeout_s=60)
    assert time.monotonic() - began < 45


def test_ended_process_is_reported_unless_a_command_may_be_starting_it_again(provider: Provider) -> None:
    provider.ended = "the worker (pid 7) has ended"
    assert lifecycle.ended_process("dev") is None  # there is no such cluster any more
    entry("dev")
    assert lifecycle.ended_process("dev") == "the worker (pid 7) has ended"
    with cluster_records.locked("dev"):
        assert lifecycle.ended_process("dev") is None


def test_up_that_can_not_be_taken_back_keeps_the_entry_and_says_what_is_left(provider: Provider) -> None:
    provider.stuck = "job 17 did not end"
    with pytest.raises(
        ClusterError, match=r"no scheduler has come up .*; job 17 did not end; try ddptrain cluster down"
    ):
        up()
    assert [each.name for each in cluster_records.every()] == ["dev"]


def test_two_ups_of_one_name_at_once_do_not_meet(provider: Provider) -> None:
    with (
        cluster_records.locked("dev"),
        pytest.raises(UsageError, match="another command is starting or ending the cluster dev"),
    ):
        up()
    assert provider.calls == []


def test_name_that_would_leave_the_folder_is_refused(provider: Provider) -> None:
    with pytest.raises(UsageError, match="is not a cluster name"):
        lifecycle.up(ClusterConfig(), "../dev", tell)


def test_up_clears_what_was_left_of_a_cluster_of_that_name(provider: Provider) -> None:
    (entry("dev").folder / "old").touch()
    provider.on_scale = lambda cluster, tell: provider.calls.append(f"old: {(cluster.folder / 'old').exists()}")
    with pytest.raises(ClusterError):
        up()
    assert provider.calls == ["stop", "scale", "old: False", "stop"]


OTHER = HostId("login2", "m2", "b2", "pid:[2]")


@pytest.mark.parametrize("command", ["up", "scale", "logs", "down"])
def test_cluster_of_another_host_stays_as_it_is_and_the_message_names_that_host(
    provider: Provider, command: str
) -> None:
    entry("dev", address="tcp://127.0.0.1:1").update(host=OTHER)
    calls: dict[str, Callable[[], object]] = {
        "up": up,
        "scale": lambda: lifecycle.scale("dev", 2, tell),
        "logs": lambda: lifecycle.logs("dev", 5),
        "down": lambda: lifecycle.down("dev", tell, now=True),
    }
    with pytest.raises(ClusterError, match=r"dev runs on the host login2, and this is .*: run the command on login2"):
        calls[command]()
    assert provider.calls == [] and [each.name for each in cluster_records.every()] == ["dev"]


@pytest.mark.parametrize("command", ["up", "down"])
def test_cluster_from_before_a_restart_is_cleaned_up(provider: Provider, command: str) -> None:
    entry("dev", address="tcp://127.0.0.1:1").update(host=dataclasses.replace(this_host(), boot="an-earlier-boot"))
    if command == "down":
        lifecycle.down("dev", tell)
        assert provider.calls == ["stop"]
    else:
        with pytest.raises(ClusterError):
            up()
        assert provider.calls == ["stop", "scale", "stop"]
    assert cluster_records.every() == []


def test_certificate_is_made_when_the_backend_or_the_user_wants_it(provider: Provider) -> None:
    modes: list[list[int]] = []
    provider.on_scale = lambda cluster, tell: modes.append(
        [stat.S_IMODE(path.stat().st_mode) for path in sorted(cluster.folder.glob("*.pem"))]
    )
    for usual, wanted in ((False, None), (False, True), (True, None), (True, False)):
        provider.tls = usual
        with pytest.raises(ClusterError):
            up(tls=wanted)
    assert modes == [[], [0o600, 0o600], [0o600, 0o600], []]


def test_tls_is_refused_where_the_backend_sees_to_it(provider: Provider) -> None:
    provider.tls = None
    with pytest.raises(UsageError, match="has its own encryption"):
        up(tls=False)
    assert provider.calls == []


def test_backend_that_starts_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="there is nothing to start"):
        lifecycle.up(ClusterConfig(backend="address", address="tcp://a:1"), "dev", tell)


# --- with a real scheduler and a real worker ---


class OneWorker(Provider):
    """Starts a scheduler and one worker with two slots, whose name is `a`; `expected` is what it claims to order."""

    expected = 1

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        folder = str(cluster.folder)
        cluster.update(workers=self.expected)
        card = str(cluster.folder / "scheduler.json")
        worker = ["-m", "ddptrain.worker", "--scheduler-file", card, "--name", "a", "--slots", "2", "--gpus", "none"]
        scheduler = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", folder]
        self.started = [processes.start(DaemonOrder(argv[1], folder, argv)) for argv in (worker, scheduler)]

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        processes.stop(self.started)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, []),
        ({"start_timeout_s": 5.0, "wait_s": 60.0, "name": "dev"}, []),
        ({"ranks": 4}, ["cluster.ranks"]),
        ({"gpus": 0, "idle_timeout_s": 60.0}, ["cluster.gpus", "cluster.idle_timeout_s"]),
        ({"backend": "slurm"}, ["cluster.backend", "cluster.slurm"]),
        ({"backend": "ssh", "ssh": SshSettings(hosts=["a"])}, ["cluster.backend", "cluster.ssh"]),
    ],
)
def test_settings_that_make_another_cluster(asked: dict[str, Any], expected: list[str]) -> None:
    started = json.loads(json.dumps(ClusterConfig().model_dump(mode="json")))  # as the record contains them
    assert lifecycle.different_settings(started, ClusterConfig(**asked).model_dump(mode="json")) == expected


def test_host_that_was_added_is_another_setting_and_its_environment_is_not_printed() -> None:
    one, two = (
        ClusterConfig(backend="ssh", ssh=SshSettings(hosts=hosts, env={"TOKEN": "s3cret"}))
        for hosts in (["a"], ["a", "b"])
    )
    told = lifecycle.different_settings(one.model_dump(mode="json"), two.model_dump(mode="json"))
    assert told == ["cluster.ssh"]


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> OneWorker:
    made = OneWorker()
    without_torch = Bench(tmp_path_factory.mktemp("stubs")).env
    monkeypatch.setenv("PYTHONPATH", without_torch["PYTHONPATH"])
    made.written = {"scheduler": "fine", "worker a": "also fine", "worker b": "no torch here"}
    monkeypatch.setattr(plugin_names, "provider_class", lambda backend: lambda: made)
    return made


def test_up_if_needed_starts_a_cluster_once_and_refuses_other_settings(one_worker: OneWorker) -> None:
    said: list[str] = []
    config = ClusterConfig(ranks=2)
    try:
        first = lifecycle.ensure_up(config, "dev", tell)
        again = lifecycle.ensure_up(config, "dev", said.append)
        assert first.deployment.record.address == again.deployment.record.address and again.slots == 2
        assert said == ["the cluster dev is up already"]
        for other, tls, name in ((ClusterConfig(ranks=1), None, r"cluster\.ranks"), (config, True, "--tls")):
            with pytest.raises(UsageError, match=rf"is up at .* with other settings \({name}\): leave them"):
                lifecycle.ensure_up(other, "dev", tell, tls=tls)
        cluster_records.find("dev").update(workers=2)
        with pytest.raises(ClusterError, match="but has lost 1 worker: start what is missing with `ddptrain cluster"):
            lifecycle.ensure_up(config, "dev", tell)
    finally:
        lifecycle.down("dev", tell)


def test_up_if_needed_waits_for_a_command_that_starts_or_ends_the_cluster(provider: Provider) -> None:
    released: list[bool] = []

    def waiting(text: str) -> None:
        if "waiting for it" in text:
            released.append(True)
            other.close()

    other = contextlib.ExitStack()
    other.enter_context(cluster_records.locked("dev"))
    with pytest.raises(ClusterError, match="no scheduler has come up"):  # this provider starts nothing
        lifecycle.ensure_up(ClusterConfig(start_timeout_s=0.2), "dev", waiting)
    assert released == [True] and provider.calls == ["scale", "stop"]


def test_too_few_slots_are_told_at_once_when_no_more_workers_can_come(one_worker: OneWorker) -> None:
    with pytest.raises(ClusterError) as caught:
        lifecycle.up(ClusterConfig(ranks=3), "dev", tell)
    assert str(caught.value).startswith("3 slots needed, but only 2 joined (2 from a (127.0.0.1)), and no more workers")
    assert cluster_records.every() == []


def test_missing_worker_is_quoted_and_what_came_is_counted(
    one_worker: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_worker.expected = 2
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)

    def joined(text: str) -> None:
        if text == "1 of 2 workers joined, 2 slots":
            passed_s[0] = 100.0  # nobody else comes

    monkeypatch.setattr(wait_ready, "time", clock)
    with pytest.raises(ClusterError) as caught:
        lifecycle.up(ClusterConfig(start_timeout_s=90), "dev", joined)
    first, *quoted = str(caught.value).splitlines()
    assert first == "2 workers ordered, 1 joined with 2 slots (2 from a (127.0.0.1)) within 90 s"
    assert quoted == ["last lines of worker b:", "  no torch here"]
    assert cluster_records.every() == []


# --- signals ---


def test_signal_waits_until_what_was_started_is_noted(provider: Provider) -> None:
    def scale(cluster: Deployment, tell: Tell) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        cluster.update(parts={"worker": 1})
        tell("worker started")
        pytest.fail("the signal was lost")

    provider.on_scale = scale
    with pytest.raises(Interrupted) as caught, interruptible():
        up()
    assert caught.value.exit_code == 143
    assert provider.calls == ["scale", "stop"]
    assert cluster_records.every() == []


def test_second_signal_breaks_into_a_provider_that_hangs(provider: Provider) -> None:
    def scale(cluster: Deployment, tell: Tell) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the signal was lost")

    provider.on_scale = scale
    with pytest.raises(Interrupted) as caught, interruptible():
        up()
    assert caught.value.exit_code == 130
    assert provider.calls == ["scale", "stop"]


def test_signal_that_breaks_into_a_library_is_told_whatever_that_makes_of_it() -> None:
    """As the interpreter does, where it comes while a thread is being started: KeyError."""

    def start() -> None:
        started: dict[str, str] = {}
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the signal was lost")
        finally:
            del started["thread"]

    with pytest.raises(Interrupted) as caught, interruptible():
        start()
    assert caught.value.exit_code == 143
    with pytest.raises(KeyError), interruptible():
        raise KeyError("thread")


def test_handlers_are_the_old_ones_afterwards(provider: Provider) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ClusterError), interruptible():
        up()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- logs, scale, down ---


def test_logs_of_one_source_are_found_by_a_word_of_its_name(provider: Provider) -> None:
    entry("dev")
    provider.written = {"scheduler": "s", "worker a": "w"}
    assert lifecycle.logs("dev", 10) == provider.written
    assert lifecycle.logs("dev", 10, "a") == {"worker a": "w"}
    with pytest.raises(UsageError, match=r"has no log \"schedular\" \(did you mean scheduler\?\)"):
        lifecycle.logs("dev", 10, "schedular")


def test_unknown_name_gets_the_nearest_one_suggested() -> None:
    entry("dev")
    for ask in (lambda: lifecycle.logs("dve", 1), lambda: lifecycle.down("dve", tell)):
        with pytest.raises(UsageError, match=r"there is no cluster \"dve\" \(did you mean dev\?\)"):
            ask()


def test_scale_of_a_cluster_that_is_gone_is_refused(provider: Provider) -> None:
    entry("dev")
    with pytest.raises(ClusterError, match="the cluster dev is not up: its start was interrupted"):
        lifecycle.scale("dev", 2, tell)
    assert provider.calls == []


def test_down_asks_a_busy_scheduler_for_its_runs_as_long_as_one_that_may_be_dead(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that is in use must not be ended only because its scheduler takes longer than a look lasts."""

    async def overview(deployment: Deployment, timeout_s: float) -> Mapping[str, object]:
        if timeout_s <= status.LOOK_TIMEOUT_S:
            raise TimeoutError("it is busy")
        return {"workers": [], "runs": [{"run_id": "night", "slots": 2, "hosts": []}], "waiting": []}

    monkeypatch.setattr(status, "_ask", overview)
    entry("dev", address="tcp://127.0.0.1:1")
    with pytest.raises(UsageError, match="the cluster dev is in use by night"):
        lifecycle.down("dev", tell)
    assert provider.calls == []


def test_down_forgets_the_cluster_only_when_all_of_it_has_ended(provider: Provider) -> None:
    entry("dev")
    provider.stuck = "process 1 did not end"
    with pytest.raises(ClusterError, match="process 1 did not end"):
        lifecycle.down("dev", tell)
    assert [each.name for each in cluster_records.every()] == ["dev"]
    provider.stuck = ""
    lifecycle.down("dev", tell)
    assert cluster_records.every() == []
