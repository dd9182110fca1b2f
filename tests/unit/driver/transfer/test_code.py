"""The code of a project: what is packed, and which workers get it."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.transfer.code_package import CodePackage, pack, project_folder, upload_code
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError, UsageError
from ddptrain.protocol.code_digest import content_hash, inode_digest
from ddptrain.protocol.rank_spec import Placement
from ddptrain.worker import driver_calls
from ddptrain.worker.spool import write_chunk

# --- What of a project goes along, and what stays at home ---


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "print(1)",
        "data/names.txt": "Rex",
        "runs/old/run.json": "{}",
        "secret.pem": "key",
        ".env": "TOKEN=1",
        "__pycache__/train.pyc": "x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return pack(folder, [folder / "runs"]).names


def test_code_and_data_go_along_and_runs_secrets_and_caches_do_not(project: Path) -> None:
    assert names(project) == ["data/names.txt", "train.py"]


def test_git_knows_what_belongs_to_the_project(project: Path) -> None:
    (project / ".gitignore").write_text("data/\n")
    (project / "new.py").write_text("")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    subprocess.run(["git", "-C", str(project), "add", "train.py"], check=True)
    assert names(project) == [".gitignore", "new.py", "train.py"]
    assert project_folder(project / "data", None) == project.resolve()
    (project / "train.py").unlink()  # of which git has not been told
    assert names(project) == [".gitignore", "new.py"]


def words(text: str) -> list[str]:
    return text.split()


SECRET = words(""".envrc prod.env conf/prod.env id_ecdsa keys/id_ecdsa_sk .git-credentials .npmrc .pypirc .aws/config
deep/.aws/credentials store.p12 store.pfx CERT.PEM Server.Key .ENV""")
HARMLESS = words("environment.yaml id_map.json keys.py secrets.py tokenizer.json environ.py .editorconfig")


@pytest.mark.parametrize("with_git", [True, False])
def test_files_that_hold_secrets_stay_here_and_what_looks_alike_goes_along(project: Path, with_git: bool) -> None:
    for name in [*SECRET, *HARMLESS]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    if with_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        subprocess.run(["git", "-C", str(project), "add", "-f", *SECRET], check=True)
    assert {*names(project)} & {*SECRET, *HARMLESS} == {*HARMLESS}


def test_own_rule_takes_a_file_along_that_looks_secret(project: Path) -> None:
    (project / "public.pem").write_text("x")
    (project / ".ddptrainignore").write_text("!public.pem\n.ddptrainignore\n")
    assert names(project) == ["data/names.txt", "public.pem", "train.py"]


def test_own_rules_leave_more_out(project: Path) -> None:
    (project / ".ddptrainignore").write_text("# big\n*.txt\n.ddptrainignore\n")
    assert names(project) == ["train.py"]


def test_links_go_along_as_links_unless_they_lead_out(project: Path) -> None:
    (project / "alias.py").symlink_to("train.py")
    (project / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(project / "pipe")
    package = pack(project, [project / "runs"])
    assert package.names == ["alias.py", "data/names.txt", "train.py"]
    with tarfile.open(fileobj=BytesIO(package.archive[0])) as archive:
        assert archive.getmember("alias.py").linkname == "train.py"


def test_too_much_is_refused_with_the_largest_files(project: Path) -> None:
    (project / "weights.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(UsageError, match=r"3\.0 MB, over 2 MB; the largest files: weights.bin \(3"):
        pack(project, [project / "runs"]).check(project / "train.py", 2)
    pack(project, []).check(project / "train.py", 4)


def test_home_is_no_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert project_folder(tmp_path, None) is None
    assert project_folder(tmp_path, str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match="not a folder"):
        project_folder(tmp_path, str(tmp_path / "nothing"))


def test_inodes_tell_a_folder_from_its_copy(project: Path, tmp_path: Path) -> None:
    package = pack(project, [])
    assert inode_digest(project, package.names) == inode_digest(project, package.names) != ""
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(project), str(other)], check=True)
    assert inode_digest(other, package.names) not in ("", inode_digest(project, package.names))
    assert content_hash(other, package.names) == package.archive[1]
    assert inode_digest(tmp_path / "nothing", package.names) == ""


def test_workload_that_would_stay_at_home_is_told(project: Path) -> None:
    (project / ".ddptrainignore").write_text("train.py\n")
    with pytest.raises(UsageError, match=r"train\.py would not be uploaded .* git or .ddptrainignore ignores it"):
        pack(project, []).check(project / "train.py", 200)


def test_results_in_the_projects_own_folder_stay_and_the_code_does_not(project: Path) -> None:
    (project / "third").mkdir()
    (project / "third" / "run.json").write_text("{}")
    assert pack(project, [project]).names == ["data/names.txt", "runs/old/run.json", "train.py"]


def test_files_of_submodules_and_of_work_trees_inside_go_along(project: Path) -> None:
    for folder in (project, project / "inside"):
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (project / "inside" / "more.py").write_text("")
    assert "inside/more.py" in names(project)


def test_links_that_lead_in_a_circle_are_left_out(project: Path) -> None:
    (project / "loop").symlink_to("loop")
    (project / "a").symlink_to("b")
    (project / "b").symlink_to("a")
    assert not {"loop", "a", "b"} & set(pack(project, []).names)


def test_absolute_link_to_a_place_inside_is_right_wherever_the_folder_is(project: Path) -> None:
    (project / "data" / "alias.py").symlink_to(project / "train.py")
    (project / "texts").symlink_to(project / "data")
    package = pack(project, [project / "runs"])
    with tarfile.open(fileobj=BytesIO(package.archive[0])) as archive:
        archive.extractall(project.parent / "there", filter="data")
    assert (project.parent / "there" / "data" / "alias.py").readlink() == Path("../train.py")
    assert (project.parent / "there" / "texts" / "names.txt").read_text() == "Rex"
    assert content_hash(project.parent / "there", package.names) == package.archive[1]


def test_name_that_no_message_can_carry_stays_at_home(project: Path) -> None:
    (project / os.fsdecode(b"odd\xff.txt")).write_text("")
    assert names(project) == ["data/names.txt", "train.py"]


def test_file_that_goes_while_it_is_packed_is_told(project: Path) -> None:
    package = pack(project, [])
    (project / "train.py").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*train\.py, which would be uploaded"):
        _ = package.archive


def test_archive_has_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "b.py").chmod(0o600)
    (tmp_path / "run.sh").write_text("true\n")
    (tmp_path / "run.sh").chmod(0o700)
    (tmp_path / "a-link").symlink_to("b.py")
    archive, _ = pack(tmp_path, []).archive
    with tarfile.open(fileobj=BytesIO(archive)) as found:
        members = [(each.name, each.issym(), each.linkname, each.size, each.mode) for each in found.getmembers()]
        owners = {(each.mtime, each.uid, each.gid, each.uname, each.gname) for each in found.getmembers()}
    assert members == [
        ("a-link", True, "b.py", 0, 0o644),
        ("b.py", False, "", 6, 0o644),
        ("run.sh", False, "", 5, 0o755),
    ]
    assert owners == {(0, 0, 0, "", "")}


# --- The project's code is uploaded once for each host, and only to workers that do not see its folder ---


CACHE = "/cache/code"


class Cluster:
    """A Dask client whose workers have file systems of their own below `root`, by host; `sees` see the driver's."""

    def __init__(self, root: Path, hosts: dict[str, str], *, sees: Sequence[str] = (), cut: Sequence[str] = ()) -> None:
        """Files that are written to the workers `cut` are damaged."""
        self.root, self.hosts, self.sees, self.cut = root, hosts, sees, cut
        self.scheduler = SimpleNamespace(address="tcp://s")
        self.calls: list[tuple[str, list[str]]] = []

    def run(self, function: Callable[..., Any], *arguments: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        assert on_error == "return"
        self.calls.append((function.__name__, workers))
        return {worker: self._answer(function.__name__, worker, arguments) for worker in workers}

    def _answer(self, name: str, worker: str, arguments: tuple[Any, ...]) -> Any:
        scratch = self.root / self.hosts[worker]
        match name:
            case "sees_code":
                return worker in self.sees
            case "write_spool":
                _, path, offset, data = arguments
                return write_chunk(scratch / path, offset, b"no" if worker in self.cut else data)
            case "holds_file":
                path = Path(arguments[0])
                return path.is_relative_to(scratch) and path.read_text() == arguments[1]
        try:
            return asyncio.run(driver_calls.unpack_code(*arguments))
        except ClusterError as error:
            return error


def places(hosts: dict[str, str]) -> list[RankPlace]:
    found = []
    for rank, (worker, host) in enumerate(hosts.items()):
        slot = Slot(worker, host, 0, counted=True, gpu=False)
        found.append(RankPlace(rank, Placement(1, rank, 1, 0, 0, shared=False), slot, host, Path("/scratch")))
    return found


@pytest.fixture
def package(tmp_path: Path) -> CodePackage:
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "train.py").write_text("print('hello')\n")
    return pack(tmp_path / "driver", [])


def upload(cluster: Cluster, package: CodePackage, max_mb: float = 1.0) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    workers = Workers(cast(Any, cluster), "run-1", queue.SimpleQueue())
    needed = package.folder / "train.py"
    return upload_code(workers, places(cluster.hosts), package, needed, max_mb, lines.append), lines


def test_workers_that_see_the_folder_get_nothing(package: CodePackage, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"w1": "a", "w2": "b"}, sees=["w1", "w2"])
    assert upload(cluster, package) == (["", ""], [])
    assert [name for name, _ in cluster.calls] == ["sees_code"]


def test_two_workers_of_one_host_get_one_copy(package: CodePackage, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"w1": "a", "w2": "b", "w3": "b"}, sees=["w1"])
    for _ in range(2):  # attempts
        (none, second, third), lines = upload(cluster, package)
        assert none == "" and second == third and Path(second).is_relative_to(tmp_path / "b")
        assert Path(second).name == package.archive[1]
        assert (Path(second) / "train.py").read_text() == "print('hello')\n"
        assert lines == [f"uploading 1 files of {package.folder} to host b"]
    assert {tuple(workers) for name, workers in cluster.calls if name == "write_spool"} == {("w2",)}


def test_code_that_is_too_large_is_refused_before_anything_is_sent(package: CodePackage, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"w1": "a"})
    with pytest.raises(UsageError, match="over 1e-06 MB"):
        upload(cluster, package, max_mb=1e-6)
    assert [name for name, _ in cluster.calls] == ["sees_code"]


def test_of_many_workers_the_one_that_fails_is_named(package: CodePackage, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"w1": "a", "w2": "b"}, cut=["w2"])
    with pytest.raises(ClusterError, match=r"could not upload the code: w2: cannot unpack .*gzip"):
        upload(cluster, package)
