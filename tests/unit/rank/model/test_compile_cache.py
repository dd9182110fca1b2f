"""Where compiled code is kept, and who may own that folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.rank.prepare import require_private, use_compile_cache
from tests.unit.specs import make_spec


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def test_folder_is_private_below_the_users_cache_and_old_code_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "ddptrain" / "compile"
    use_compile_cache(make_spec(), pytest.fail)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(root) and root.stat().st_mode & 0o777 == 0o700
    (root / "old").mkdir()
    (root / "new").mkdir()
    os.utime(root / "old", (0, 0))
    use_compile_cache(make_spec(), pytest.fail)
    assert [path.name for path in root.iterdir()] == ["new"]


@pytest.mark.parametrize(("chosen", "kept"), [("/mine", True), ("/tmp/torchinductor_someone", False)])
def test_folder_that_the_user_chose_stays_and_torchs_default_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, kept: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compile_cache(make_spec(env={"TORCHINDUCTOR_CACHE_DIR": chosen}), pytest.fail)
    assert ("TORCHINDUCTOR_CACHE_DIR" not in os.environ) == kept
    assert (tmp_path / "ddptrain").exists() != kept


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_folder_that_others_can_open_is_not_used_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ddptrain" / "compile").mkdir(parents=True)
    (tmp_path / "ddptrain" / "compile").chmod(mode)
    notes: list[str] = []
    spec = make_spec()
    use_compile_cache(spec, notes.append)
    assert len(notes) == 1 and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(Path(spec.host.staging) / "compile")


def test_folder_of_another_user_or_behind_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    require_private(tmp_path / "real")
    with pytest.raises(PermissionError, match="must belong to user"):
        require_private(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(PermissionError, match="must belong to user 4711"):
        require_private(tmp_path / "real")


def test_folder_below_one_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open" / "mine").mkdir(parents=True, mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="can be changed by other users: set XDG_CACHE_HOME"):
        require_private(tmp_path / "open" / "mine")
    (tmp_path / "open").chmod(0o1777)
    require_private(tmp_path / "open" / "mine")


@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_private"),
    [
        ("user", "other", 0o755, True),
        ("root", "other", 0o755, True),
        ("other", "other", 0o755, False),
        ("user", "other", 0o775, False),
        ("user", "own", 0o775, True),  # the umask 002 of many systems
        ("user", "own", 0o777, False),
        ("user", "other", 0o1777, True),
    ],
)
def test_folders_above_may_be_changed_by_the_user_and_root_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, group: str, mode: int, is_private: bool
) -> None:
    user = 4711
    numbers = {"user": user, "own": user, "root": 0, "other": 4712}
    monkeypatch.setattr(os, "geteuid", lambda: user)
    above = SimpleNamespace(st_uid=numbers[owner], st_gid=numbers[group], st_mode=stat.S_IFDIR | mode)
    status = SimpleNamespace(st_uid=user, st_mode=stat.S_IFDIR | 0o700)
    parents = [SimpleNamespace(stat=lambda: above)]
    folder: Any = SimpleNamespace(lstat=lambda: status, resolve=lambda: SimpleNamespace(parents=parents))
    if is_private:
        require_private(folder)
    else:
        with pytest.raises(PermissionError, match="can be changed by other users"):
            require_private(folder)
