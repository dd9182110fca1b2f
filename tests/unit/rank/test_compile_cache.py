"""Where compiled code is kept, and who may own that folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.rank.prepare import use_compile_cache
from tests.unit.specs import make_spec


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def test_folder_is_private_below_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "ddptrain" / "compile"
    use_compile_cache(make_spec())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(root) and root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("chosen", "kept"), [("/mine", True), ("/tmp/torchinductor_someone", False)])
def test_folder_that_the_user_chose_stays_and_torchs_default_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, kept: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compile_cache(make_spec(env={"TORCHINDUCTOR_CACHE_DIR": chosen}))
    assert ("TORCHINDUCTOR_CACHE_DIR" not in os.environ) == kept
    assert (tmp_path / "ddptrain").exists() != kept


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_folder_that_others_can_open_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ddptrain" / "compile").mkdir(parents=True)
    (tmp_path / "ddptrain" / "compile").chmod(mode)
    spec = make_spec()
    use_compile_cache(spec)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(Path(spec.host.staging) / "compile")
