"""The folder of a user's clusters: nobody else reads it, and nothing in it is half written."""

from __future__ import annotations

import dataclasses
import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain import file_ops
from ddptrain.clusters import cluster_records, resolve, security
from ddptrain.clusters.cluster_records import ClusterRecord
from ddptrain.config.sections.clusters import TlsSettings
from ddptrain.errors import ClusterError, UsageError
from ddptrain.host_identity import HostId, Relation, this_host


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path / "ddptrain" / "clusters"
    monkeypatch.undo()


def record(name: str = "dev", address: str = "") -> ClusterRecord:
    return ClusterRecord(name, "local", "2026-01-01T00:00:00Z", address, settings={"ssh": {"env": {"TOKEN": "s3cret"}}})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_reads_what_is_kept(folder: Path) -> None:
    made = cluster_records.create(record())
    security.make_tls(made.folder)
    made.update(parts={"pid": 1})
    assert mode(folder) == mode(made.folder) == 0o700
    assert {path.name: mode(path) for path in made.folder.iterdir()} == dict.fromkeys(
        ("cluster.json", "cert.pem", "key.pem"), 0o600
    )


def test_every_cluster_has_a_key_of_its_own() -> None:
    keys = []
    for name in ("a", "b"):
        made = cluster_records.create(record(name))
        security.make_tls(made.folder)
        keys.append((made.folder / "key.pem").read_bytes())
    assert keys[0] != keys[1]


def test_cluster_is_found_again_with_what_was_changed() -> None:
    cluster_records.create(record()).update(address="tcp://h:1", parts={"pids": [1, 2]}, workers=3)
    found = cluster_records.find("dev")
    assert (found.record.address, found.record.parts, found.record.workers) == ("tcp://h:1", {"pids": [1, 2]}, 3)
    assert "s3cret" not in repr(found.record)


def test_second_cluster_of_a_name_is_refused() -> None:
    cluster_records.create(record())
    with pytest.raises(UsageError, match="there is a cluster dev already"):
        cluster_records.create(record())


@pytest.mark.parametrize("name", ["../x", "", ".", "Dev", "a/b", "x" * 65])
def test_name_that_is_no_plain_name_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(UsageError, match="is not a cluster name"):
        cluster_records.create(record(name))
    with pytest.raises(cluster_records.ClusterNotFound):
        cluster_records.find(name)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_unknown_name_is_answered_with_the_nearest() -> None:
    cluster_records.create(record("trainer"))
    with pytest.raises(cluster_records.ClusterNotFound, match='there is no cluster "trainr" \\(did you mean trainer'):
        cluster_records.find("trainr")


def test_address_that_the_scheduler_tells_later_is_seen() -> None:
    made = cluster_records.create(record())
    with pytest.raises(ClusterError, match="has no scheduler yet"):
        resolve.by_name("dev")
    (made.folder / "scheduler.json").write_text(json.dumps({"address": "tcp://h:2", "dashboard": ""}))
    assert resolve.by_name("dev").address == "tcp://h:2"


def test_removed_cluster_is_gone(folder: Path) -> None:
    cluster_records.create(record()).remove()
    assert not (folder / "dev").exists() and cluster_records.every() == []


def test_second_command_on_a_cluster_is_refused_while_the_first_lasts() -> None:
    refused: list[str] = []

    def second() -> None:
        try:
            with cluster_records.locked("dev"):
                pass
        except UsageError as error:
            refused.append(str(error))

    with cluster_records.locked("dev"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    with cluster_records.locked("dev"):
        pass
    assert len(refused) == 1 and "another command" in refused[0]


def test_lock_file_goes_with_the_cluster() -> None:
    """Each run with a cluster of its own has another name: nobody would ever delete the files."""
    assert not cluster_records.is_locked("dev")
    with cluster_records.locked("dev"):
        made = cluster_records.create(record())
    lock = made.folder.with_name(".dev.lock")
    assert lock.exists() and not cluster_records.is_locked("dev")
    with cluster_records.locked("dev"):
        assert cluster_records.is_locked("dev")
        made.remove()
    assert not list(cluster_records.clusters_dir().iterdir())


def test_lock_that_was_deleted_during_the_wait_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cluster_records.locked("dev")
    first.__enter__()
    real, tries = file_ops.try_lock, []

    def waiting(descriptor: int, **how: bool) -> bool:
        tries.append(descriptor)
        if len(tries) == 1:
            first.__exit__(None, None, None)  # the file is deleted after the second command has opened it
        return real(descriptor, **how)

    monkeypatch.setattr(cluster_records, "try_lock", waiting)
    with cluster_records.locked("dev"):
        assert len(tries) == 2 and cluster_records.is_locked("dev")


def test_cluster_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cluster_records.create(record(address="tcp://h:1"))
    made.update(version="0.0.1")
    with pytest.raises(ClusterError, match=r"was started by ddptrain 0\.0\.1"):
        resolve.by_name("dev")


# --- the host of a cluster ---

OTHER = HostId("login2", "m2", "b2", "pid:[2]")
RESTARTED = dataclasses.replace(this_host(), boot="an-earlier-boot")


def test_record_has_the_host_that_made_it() -> None:
    cluster_records.create(record())
    assert cluster_records.find("dev").record.host == this_host()


@pytest.mark.parametrize(
    ("backend", "address", "host", "expected"),
    [
        ("local", "tcp://127.0.0.1:1", this_host(), Relation.SAME),
        ("local", "tcp://127.0.0.1:1", OTHER, Relation.OTHER),
        ("local", "", OTHER, Relation.OTHER),  # its start is under way, or was broken off
        ("local", "tcp://127.0.0.1:1", RESTARTED, Relation.RESTARTED),
        ("local", "unix:///tmp/d-1/s", OTHER, Relation.OTHER),
        ("mine", "unix:///tmp/d-1/s", OTHER, Relation.OTHER),
        ("class", "tcp://127.0.0.1:1", OTHER, Relation.OTHER),
        ("class", "tls://10.0.0.1:1", OTHER, Relation.SAME),  # the network leads there; its keeper's pid is checked
        ("kubernetes", "tls://127.0.0.1:1", OTHER, Relation.OTHER),  # through a port-forward
        ("kubernetes", "tls://dev-scheduler.ns.svc:8786", OTHER, Relation.SAME),
        ("ssh", "tls://gpu1:1", OTHER, Relation.SAME),
        ("ssh", "tls://127.0.0.1:1", OTHER, Relation.OTHER),
        ("slurm", "", OTHER, Relation.SAME),  # any host with Slurm's commands can cancel its jobs
        ("slurm", "tls://node1:1", RESTARTED, Relation.SAME),
        ("saturn", "tls://s.example:1", OTHER, Relation.SAME),
    ],
)
def test_which_clusters_one_host_alone_can_use(backend: str, address: str, host: HostId, expected: Relation) -> None:
    found = cluster_records.Deployment(
        Path("x"), dataclasses.replace(record(address=address), backend=backend, host=host)
    )
    assert found.relation == expected


def test_cluster_of_another_host_is_not_connected_to_and_the_message_names_that_host() -> None:
    cluster_records.create(record(address="tcp://127.0.0.1:1")).update(host=OTHER)
    with pytest.raises(ClusterError, match=r"the cluster dev runs on the host login2, and this is .*: run the command"):
        resolve.by_name("dev")
    assert resolve.by_address("tcp://127.0.0.1:1", None).name == ""  # the same address here is not that cluster


def test_cluster_from_before_a_restart_is_not_connected_to() -> None:
    """Another user's process may listen at its port now."""
    cluster_records.create(record(address="tcp://127.0.0.1:1")).update(host=RESTARTED)
    with pytest.raises(ClusterError, match=r"was restarted after the cluster dev was started: .*cluster down dev"):
        resolve.by_name("dev")
    assert resolve.by_address("tcp://127.0.0.1:1", None).name == ""


# --- which cluster an address or a file means ---


@pytest.mark.parametrize("asked", ["tls://h:1", "h:1"])
def test_own_cluster_is_known_by_its_address_and_its_certificate_used(asked: str) -> None:
    made = cluster_records.create(record(address="tls://h:1"))
    security.make_tls(made.folder)
    target = resolve.by_address(asked, None)
    assert (target.address, target.name, target.foreign) == ("tls://h:1", "dev", False)
    assert target.security is not None and target.security.require_encryption


def test_address_of_others_is_taken_as_it_is() -> None:
    assert resolve.by_address("h:1", None) == resolve.Target("tcp://h:1")
    assert resolve.by_address("tls://h:1", None) == resolve.Target("tls://h:1")


def test_certificate_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    files = TlsSettings(ca_file=str(tmp_path / "ca.pem"), cert_file="x", key_file="y")
    with pytest.raises(ClusterError, match=r"ca\.pem can't be read: No such file"):
        resolve.by_address("h:1", files)


def test_scheduler_file_names_the_address(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps({"type": "Scheduler", "id": "x", "address": "tcp://h:7", "workers": {}}))
    assert resolve.by_scheduler_file(path, None).address == "tcp://h:7"


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_file_of_something_else_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match='contains no "address"'):
        resolve.by_scheduler_file(path, None)
    with pytest.raises(ClusterError, match="can't be read: No such file"):
        resolve.by_scheduler_file(tmp_path / "none.json", None)


def test_folder_without_a_record_is_replaced(folder: Path) -> None:
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "scheduler.json").write_text('{"address": "tcp://old"}')
    made = cluster_records.create(record())
    assert made.record.address == "" and [path.name for path in made.folder.iterdir()] == ["cluster.json"]
    with pytest.raises(UsageError, match=r"^there is a cluster dev already: ddptrain cluster down dev ends it$"):
        cluster_records.create(record())
