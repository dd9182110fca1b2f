"""What of a project goes along, and what stays at home."""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from ddptrain.codefolder import content_hash, identity, moved
from ddptrain.driver.packing import Package, pack, project_folder
from ddptrain.errors import UsageError


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


def test_own_rules_leave_more_out(project: Path) -> None:
    (project / ".ddptrainignore").write_text("# big\n*.txt\n.ddptrainignore\n")
    assert names(project) == ["train.py"]


def test_links_go_along_as_links_unless_they_lead_out(project: Path) -> None:
    (project / "alias.py").symlink_to("train.py")
    (project / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(project / "pipe")
    package = pack(project, [project / "runs"])
    assert package.names == ["alias.py", "data/names.txt", "train.py"]
    with tarfile.open(fileobj=BytesIO(package.archive()[0])) as archive:
        assert archive.getmember("alias.py").linkname == "train.py"


def test_too_much_is_refused_with_the_largest_files(project: Path) -> None:
    (project / "weights.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(UsageError, match=r"3\.0 MB, over code.max_mb, which is 2; the largest files: weights.bin \(3"):
        pack(project, [project / "runs"]).check_size(2)
    pack(project, []).check_size(4)


def test_hash_is_of_names_contents_and_whether_a_file_is_a_program(project: Path) -> None:
    first = pack(project, []).hash
    os.utime(project / "train.py", (1, 1))
    assert pack(project, []).hash == first
    (project / "train.py").chmod(0o755)
    second = pack(project, []).hash
    (project / "train.py").write_text("print(2)")
    assert len({first, second, pack(project, []).hash}) == 3


def test_archive_is_the_same_for_the_same_content(project: Path) -> None:
    first = pack(project, []).archive()
    os.utime(project / "train.py", (1, 1))
    assert pack(project, []).archive() == first
    assert first[1] == pack(project, []).hash


def test_file_that_changes_while_it_is_packed_has_the_hash_of_what_was_packed(project: Path) -> None:
    package = pack(project, [])
    before = package.hash
    with (project / "train.py").open("a") as file:
        file.write("  # edited")
    assert package.archive()[1] == pack(project, []).hash != before
    assert identity(project, package.names) == identity(project, package.names)


def test_file_that_cannot_be_read_is_named(project: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.py.*No such file"):
        _ = Package(project, {"gone.py": 1}).hash


def test_home_is_no_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert project_folder(tmp_path, None) is None
    assert project_folder(tmp_path, str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match="no folder"):
        project_folder(tmp_path, str(tmp_path / "nothing"))


def test_inodes_tell_a_folder_from_its_copy(project: Path, tmp_path: Path) -> None:
    package = pack(project, [])
    assert identity(project, package.names) == identity(project, package.names) != ""
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(project), str(other)], check=True)
    assert identity(other, package.names) not in ("", identity(project, package.names))
    assert content_hash(other, package.names) == package.hash
    assert identity(tmp_path / "nothing", package.names) == ""


def test_paths_move_with_the_folder() -> None:
    assert moved("/p/a/b", Path("/p"), "/cache/x") == "/cache/x/a/b"
    assert moved("/p", Path("/p"), "/cache/x") == "/cache/x"
    assert moved("/elsewhere", Path("/p"), "/cache/x") == "/elsewhere"
    assert moved("/p/a", Path("/p"), "") == "/p/a"
