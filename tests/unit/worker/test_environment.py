"""The cache of environments on a host: private, complete or not there, and only so large."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.worker import environment
from tests.support.environments import make_wheel

KEPT = 5
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddptrain" / "environments"


def test_environment_is_made_once_also_by_two_at_once(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "wordlib", "1.0", "")
    needed = {environment.REQUIREMENTS: f"--no-index\n--find-links {tmp_path / 'wheels'}\nwordlib==1.0\n"}
    assert environment.python_of("one") == "" and environment.hold("one") is None
    both = [threading.Thread(target=environment.install, args=("one", needed, ENVIRON)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    found = environment.hold("one")
    assert found is not None and found[0] == environment.python_of("one")
    os.close(found[1])
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert (folder / "bin" / "python") == Path(found[0]) and list(folder.glob("lib/*/site-packages/wordlib.py"))
    assert cache.stat().st_mode & 0o077 == 0 and environment.python_of("other") == ""


def test_another_ddptrain_in_an_environment_is_refused(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "ddptrain", "0.0.9", "")
    needed = {environment.REQUIREMENTS: f"--no-index\n--find-links {tmp_path / 'wheels'}\nddptrain==0.0.9\n"}
    without_path = {name: value for name, value in ENVIRON.items() if name != "PYTHONPATH"}
    with pytest.raises(UsageError, match="the environment has ddptrain"):
        environment.install("other", needed, without_path)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_oldest_are_deleted_but_not_one_that_is_held(cache: Path) -> None:
    for number in range(KEPT + 1):
        (cache / f"old-{number}").mkdir(parents=True, mode=0o700)
        os.utime(cache / f"old-{number}", (1000.0 + number, 1000.0 + number))
    cache.chmod(0o700)
    environment.install("oldest", {environment.REQUIREMENTS: ""}, ENVIRON)
    held = environment.hold("oldest")
    assert held is not None
    folder = Path(held[0]).parents[1]
    os.utime(folder, (1.0, 1.0))
    environment.install("newest", {environment.REQUIREMENTS: ""}, ENVIRON)
    os.close(held[1])
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert folder.name in left and len(left) == KEPT + 1
    assert {name for name in left if name.startswith("old-")} == {"old-2", "old-3", "old-4", "old-5"}


def test_cache_of_others_is_refused_and_a_failure_leaves_nothing(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    with pytest.raises(ClusterError, match="0700"):
        environment.install("one", {environment.REQUIREMENTS: ""}, ENVIRON)
    cache.chmod(0o700)
    with pytest.raises(ClusterError, match="uv pip sync"):
        environment.install("one", {environment.REQUIREMENTS: "--no-index\nwordlib==1.0\n"}, ENVIRON)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
