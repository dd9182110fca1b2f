"""Records of clusters: private, found by name and by address, locked, and not used where they are of no use."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from ddptrain.clusters import record as records
from ddptrain.clusters import resolve
from ddptrain.clusters.processes import Relation
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.security import make_tls
from ddptrain.config.sections.clusters import ClusterConfig, SshSettings
from ddptrain.errors import ClusterError, UsageError
from ddptrain.host_identity import HostId, this_host

OTHER = HostId("login2", "m", "b", "p")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "ddptrain" / "clusters"


def test_what_was_saved_is_found_again_and_private(state: Path) -> None:
    ssh = SshSettings(hosts=["a", "b"])
    cluster = records.create(ClusterRecord(name="dev", config=ClusterConfig(backend="ssh", ssh=ssh, ranks=4)))
    make_tls(cluster.folder)
    cluster.keep(Part(role="worker", host="a", id="folder"))
    cluster.keep(Part(role="worker", host="b"))
    cluster.keep(Part(role="worker", host="a", id="folder", log="x"))
    found = records.find("dev")
    assert found == cluster and [(part.host, part.log) for part in found.parts] == [("a", "x"), ("b", "")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.rglob("*"))}
    assert modes == {"clusters": 0o700, "dev": 0o700, "cluster.json": 0o600, "cert.pem": 0o600, "key.pem": 0o600}
    found.remove()
    assert records.every() == []


def test_name_that_is_taken_unknown_or_none_is_refused() -> None:
    records.create(ClusterRecord(name="dev"))
    with pytest.raises(UsageError, match="a cluster dev already"):
        records.create(ClusterRecord(name="dev"))
    with pytest.raises(records.ClusterNotFound, match="did you mean dev"):
        records.find("dve")
    for name in ("../x", "", "A"):
        with pytest.raises(UsageError, match="is not a cluster name"), records.locked(name):
            pass


def test_cluster_of_a_version_with_other_fields_can_be_ended() -> None:
    cluster = records.create(
        ClusterRecord(name="dev", config=ClusterConfig(backend="ssh", ssh=SshSettings(hosts=["a"])))
    )
    file = cluster.folder / "cluster.json"
    content = json.loads(file.read_text())
    content["config"]["gone"] = content["config"]["ssh"]["gone"] = {"a": 1}
    file.write_text(json.dumps(content))
    assert records.find("dev") == cluster


def test_address_that_the_scheduler_writes_is_read_also_from_a_shared_folder(tmp_path: Path) -> None:
    cluster = records.create(ClusterRecord(name="dev", shared=str(tmp_path)))
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": "tls://h:1"}))
    assert records.find("dev").address == cluster.read_address().address == "tls://h:1"


def test_second_command_on_a_cluster_is_refused_while_the_first_lasts(state: Path) -> None:
    with records.locked("dev"):
        assert records.is_locked("dev")
        with pytest.raises(UsageError, match="another command"), records.locked("dev", patience_s=0.0):
            pass
    assert not records.is_locked("dev") and list(state.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("tcp://10.0.0.1:1", OTHER, Relation.SAME),
        ("tls://127.0.0.1:1", OTHER, Relation.OTHER),
        ("tls://127.0.0.1:1", this_host(), Relation.SAME),
    ],
)
def test_cluster_that_listens_on_a_network_is_used_from_every_host(
    address: str, host: HostId, expected: Relation
) -> None:
    ssh = ClusterConfig(backend="ssh", ssh=SshSettings(hosts=["a"]))
    assert ClusterRecord(name="dev", config=ssh, address=address, host=host).relation == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": OTHER}, "runs on the host login2"),
        ({"version": "0.0.1"}, "started by ddptrain 0.0.1"),
        ({"address": ""}, "has no scheduler yet"),
    ],
)
def test_cluster_that_can_not_be_used_says_why(change: dict[str, object], words: str) -> None:
    cluster = records.create(ClusterRecord(name="dev", address="tls://127.0.0.1:1"))
    for name, value in change.items():
        setattr(cluster, name, value)
    cluster.save()
    with pytest.raises(ClusterError, match=words):
        resolve.by_name("dev")


def test_own_cluster_is_known_by_its_address_and_others_are_taken_as_they_are(tmp_path: Path) -> None:
    cluster = records.create(ClusterRecord(name="dev", address="tls://127.0.0.1:8786"))
    make_tls(cluster.folder)
    for address in ("127.0.0.1:8786", "tls://127.0.0.1:8786"):
        target = resolve.by_address(address)
        assert (target.name, target.address) == ("dev", "tls://127.0.0.1:8786") and target.security is not None
    other = resolve.by_address("h:1")
    assert (other.name, other.address, other.foreign) == ("", "tcp://h:1", True)
    file = tmp_path / "scheduler.json"
    file.write_text('{"address": "tcp://h:2"}')
    assert resolve.by_address(str(file)).address == "tcp://h:2"
    for text in ("{}", "[]", "nonsense"):
        file.write_text(text)
        with pytest.raises(ClusterError, match='contains no "address"'):
            resolve.by_address(str(file))
