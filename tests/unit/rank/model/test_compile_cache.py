"""The compile cache: who may own it, who holds it, what is deleted, and what a damaged one does."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddptrain.file_ops import open_regular, try_lock
from ddptrain.rank.model import compile_cache
from ddptrain.rank.model.compile_cache import CompileCache, cache_key, inductor_backend, prune, require_private
from tests.unit.specs import change_spec, make_spec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def test_folder_of_the_key_is_private_and_below_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = inductor_backend(make_spec(), CPU, pytest.fail)
    folder = tmp_path / "ddptrain" / "compile" / cache_key(make_spec().code, CPU)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert callable(backend)
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


@pytest.mark.parametrize(("chosen", "kept"), [("/mine", True), ("/tmp/torchinductor_someone", False)])
def test_folder_that_the_user_chose_stays_and_torchs_default_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, kept: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = inductor_backend(make_spec(env={"TORCHINDUCTOR_CACHE_DIR": chosen}), CPU, pytest.fail)
    assert (backend == "inductor") == kept
    assert (tmp_path / "ddptrain").exists() != kept


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_folder_that_others_can_open_is_not_used_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ddptrain" / "compile").mkdir(parents=True)
    (tmp_path / "ddptrain" / "compile").chmod(mode)
    told: list[str] = []
    assert inductor_backend(make_spec(staging=str(tmp_path / "staging")), CPU, told.append) == "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "staging" / "compile")
    (line,) = told
    assert "compiled code is not kept for later runs: " in line and "must belong to user" in line


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


def test_key_differs_by_code_torch_and_device_and_not_by_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    key = cache_key(spec.code, CPU)
    assert cache_key(change_spec(spec, params={"epochs": 3}).code, CPU) == key
    assert cache_key(change_spec(spec, workload="m:other").code, CPU) != key
    assert cache_key(change_spec(spec, workdir="/other").code, CPU) != key
    uploaded = [change_spec(spec, workdir=folder, content_hash="x").code for folder in ("/a", "/b")]
    assert cache_key(uploaded[0], CPU) == cache_key(uploaded[1], CPU), "each version of it has a folder of its own"
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert cache_key(spec.code, CPU) != key


def filled(root: Path, name: str, size: int, used: int) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "kernel.so").write_bytes(b"x" * size)
    os.utime(root / name, (used, used))
    return root / name


def test_what_was_used_least_recently_is_deleted_unless_it_is_in_use(tmp_path: Path) -> None:
    root = tmp_path / "compile"
    root.mkdir(mode=0o700)
    old, new = filled(root, "old", 600, 1), filled(root, "new", 600, 3)
    held = CompileCache("held", root, 10_000)
    (held.folder / "kernel.so").write_bytes(b"x" * 600)
    os.utime(held.folder, (2, 2))
    left = filled(root, ".removed-1", 10, 9)
    prune(root, 1000)
    assert (old.exists(), held.folder.exists(), new.exists(), left.exists()) == (False, True, True, False)
    os.close(held._use)


def test_key_that_outgrows_the_limit_begins_afresh(tmp_path: Path) -> None:
    root = tmp_path / "compile"
    root.mkdir(mode=0o700)
    filled(root, "key", 2000, 1).chmod(0o700)
    cache = CompileCache("key", root, 1000)
    assert list(cache.folder.iterdir()) == []
    os.close(cache._use)


HOLDS = """
import os, sys, types
from pathlib import Path
sys.modules["torch"] = types.ModuleType("torch")  # the import takes 2 s of CPU time, and nothing here calls torch
from ddptrain.rank.model.compile_cache import CompileCache
cache = CompileCache("key", Path(sys.argv[1]))
with cache.exclusive():
    (cache.folder / "half-written.so").write_bytes(b"x")
    print("compiling", flush=True)
    sys.stdin.read()
    (cache.folder / "done").touch()
    if sys.argv[2] == "dies":
        os._exit(9)
"""


@pytest.mark.parametrize(("end", "left"), [("dies", set()), ("ends", {"half-written.so", "done"})])
def test_ranks_compile_one_after_the_other_and_files_of_a_killed_one_are_deleted(
    tmp_path: Path, end: str, left: set[str]
) -> None:
    root = tmp_path / "compile"
    cache = CompileCache("key", root)
    command = [sys.executable, "-c", HOLDS, str(root), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "compiling\n"
        lock = open_regular(root / "key.compile", os.O_RDWR)
        assert not try_lock(lock)
        os.close(lock)
        other.stdin.close()
        with cache.exclusive():  # waits for the other one
            assert {path.name for path in cache.folder.iterdir()} == left
    os.close(cache._use)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_compiling_that_fails_with_the_cache_is_repeated_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torch._inductor import compile_fx

    folder = tmp_path / "ddptrain" / "compile" / cache_key(make_spec().code, CPU)
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    if is_damaged:
        (folder / "damaged.so").touch()
    calls: list[list[str]] = []

    def inner(*_: Any, **__: Any) -> str:
        calls.append([path.name for path in folder.iterdir()])
        if len(calls) == 1:
            raise OSError("file too short")
        return "compiled"

    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, inner_compile: inner_compile(graph, inputs))
    monkeypatch.setattr(compile_cache, "_forget_loaded_code", lambda: None)
    backend = inductor_backend(make_spec(), CPU, pytest.fail)
    assert not isinstance(backend, str)
    if is_damaged:
        assert backend("graph", []) == "compiled"
        assert calls == [["damaged.so"], []]
    else:
        with pytest.raises(OSError, match="file too short"):
            backend("graph", [])


def test_cache_that_cannot_be_locked_does_not_end_the_run(tmp_path: Path) -> None:
    cache = CompileCache("key", tmp_path / "compile")
    (tmp_path / "compile" / "key.compile").mkdir()
    entered = False
    with cache.exclusive():
        entered = True
    assert entered
    os.close(cache._use)


def test_key_names_the_gpu_or_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["H200", "H100", "H200"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    monkeypatch.setattr(compile_cache, "_processor", lambda: "H200")
    code, gpu = make_spec().code, torch.device("cuda", 0)
    first, other, again = (cache_key(code, gpu) for _ in range(3))
    assert first == again == cache_key(code, CPU) != other and len(first) == 32


def test_processor_is_its_model_and_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    core = "model name\t: Xeon\nflags\t: avx2\ncpu MHz\t: {}\n\n"
    info.write_text(core.format(2000.5) + core.format(2001))
    monkeypatch.setattr(compile_cache, "Path", lambda path: info if path == "/proc/cpuinfo" else None)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert compile_cache._processor() == "flags\t: avx2\nmodel name\t: Xeon"
    info.unlink()
    assert compile_cache._processor() == "arm"


@pytest.mark.parametrize(("limit", "kept"), [(1200, True), (1199, False)])
def test_cache_may_have_as_many_bytes_as_its_limit(tmp_path: Path, limit: int, kept: bool) -> None:
    old, new = filled(tmp_path, "old", 600, 1), filled(tmp_path, "new", 600, 3)
    (tmp_path / "link").symlink_to(new)
    (tmp_path / "old.use").write_bytes(b"x" * 5000)
    prune(tmp_path, limit)
    assert (old.exists(), new.exists()) == (kept, True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".removed-")]


def test_file_that_another_process_deletes_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(b"xyz")
    assert [compile_cache._size(tmp_path / name) for name in ("kernel.so", "gone.so")] == [3, 0]


def test_use_of_a_key_is_shared_and_counts_for_its_age(tmp_path: Path) -> None:
    root = tmp_path / "compile"
    root.mkdir(mode=0o700)
    filled(root, "key", 1, 1).chmod(0o700)
    first, second, other = (CompileCache(key, root) for key in ("key", "key", "other"))
    assert first.folder.stat().st_mtime > 1_000_000 and not first.is_empty and not second.is_empty
    assert other.is_empty
    prune(root, 0)
    assert first.folder.exists(), "it is in use"
    for cache in (first, second, other):
        os.close(cache._use)
    prune(root, 0)
    assert not first.folder.exists()


def test_content_is_deleted_and_what_links_lead_to_is_not(tmp_path: Path) -> None:
    cache = CompileCache("key", tmp_path / "compile")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (cache.folder / "deep" / "deeper").mkdir(parents=True)
    (cache.folder / "file").touch()
    (cache.folder / "link").symlink_to(elsewhere)
    cache.is_empty = False
    cache.clear()
    assert list(cache.folder.iterdir()) == [] and (elsewhere / "file").exists() and cache.is_empty
    os.close(cache._use)


def test_lock_says_that_a_process_compiles_while_it_does(tmp_path: Path) -> None:
    cache = CompileCache("key", tmp_path / "compile")
    lock = tmp_path / "compile" / "key.compile"
    for _ in range(2):
        with cache.exclusive():
            assert lock.read_bytes() == b"compiling"
        assert lock.read_bytes() == b""
    os.close(cache._use)


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


def test_modules_that_inductor_has_loaded_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("torch._inductor.utils.clear_caches", lambda: calls.append(True))
    compile_cache._forget_loaded_code()
    assert calls == [True]
