"""One retraining a model, and fingerprints of its data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import RunLocked, UsageError
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.retrain.fingerprint import TrainingData, code_digest, config_digest, difference, look_at_data, names_data
from ddptrain.retrain.start import ModelLock

# --- The lock of a model in a folder; tests/integration has the one in an object store ---


PATIENCE_S = 30.0
_OTHER = """
import sys, time
from pathlib import Path
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.retrain.start import ModelLock
from ddptrain.storage.object_store import ObjectStore, open_folder

owner = ModelLock(OwnFolder(Path(sys.argv[1])), "names")
with owner.held(0.0, print, lambda: None):
    print("owned", flush=True)
    time.sleep(60)
"""


def lock_in(folder: Path) -> ModelLock:
    return ModelLock(OwnFolder(folder / "models"), "names")


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _OTHER, str(folder / "models")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"owned\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def nothing(text: str = "") -> None:
    """Take no notice."""


def test_second_owner_is_refused_and_the_first_is_named_until_its_process_ends(tmp_path: Path) -> None:
    refused = pytest.raises(RunLocked, match=r"model names is being retrained by process \d+ on ")
    with other_process(tmp_path) as process:
        with refused, lock_in(tmp_path).held(0.0, nothing, nothing):
            pass
        process.kill()
        process.wait()
        with lock_in(tmp_path).held(0.0, nothing, nothing):
            pass
    with lock_in(tmp_path).held(0.0, nothing, nothing):
        pass  # released


def test_wait_gives_up_in_time_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        lock_in(tmp_path).held(0.0, nothing, nothing),
        pytest.raises(RunLocked, match=r"and did not end within 0.05 s"),
        lock_in(tmp_path).held(0.05, said.append, nothing),
    ):
        pass
    assert len(said) == 1 and "waiting for its end" in said[0]


def test_model_is_owned_once_the_other_process_was_stopped(tmp_path: Path) -> None:
    with other_process(tmp_path) as process, lock_in(tmp_path).held(PATIENCE_S, nothing, process.terminate):
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


# --- The listing of training data: what counts as a change, and how it is described ---


def resolved(folder: Path, **fields: Any) -> ResolvedConfig:
    return load_mapping({"workload": "petnames", **fields}, folder)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for name in ("cat/1.png", "cat/2.png", "pug/1.png", ".hidden/1.png", "cat/.DS_Store"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def of_images(folder: Path, **params: Any) -> ResolvedConfig:
    return resolved(folder, workload="images", params={"source": str(folder), **params})


def as_record(data: TrainingData) -> RetrainRecord:
    about = {"n_files": data.n_files, "size_bytes": data.size_bytes, "classes": data.classes}
    return RetrainRecord(1, "names", "", data=data.digest, **about)  # type: ignore[arg-type]


def test_files_of_a_folder_are_listed_without_hidden_ones(images: Path) -> None:
    found = look_at_data(of_images(images))
    assert (found.n_files, found.size_bytes, found.classes, found.noun) == (3, 27, ("cat", "pug"), "image")


def test_file_with_another_size_or_time_is_changed(images: Path) -> None:
    before = look_at_data(of_images(images))
    assert difference(as_record(before), look_at_data(of_images(images))) == []
    os.utime(images / "cat" / "1.png", (1, 1))
    assert difference(as_record(before), look_at_data(of_images(images))) == ["changed"]


def test_one_file_is_a_source(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("rex\n")
    before = look_at_data(resolved(tmp_path, params={"names": str(names)}))
    names.write_text("rex\nbella\n")
    after = look_at_data(resolved(tmp_path, params={"names": str(names)}))
    assert (before.n_files, before.size_bytes, after.size_bytes) == (1, 4, 10) and before.digest != after.digest


def test_sources_of_a_function_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").write_text("1")
    (tmp_path / "b.csv").write_text("2")
    (tmp_path / "mine.py").write_text("def main(ctx): ...")
    sources = {"sources": [str(tmp_path / "a"), str(tmp_path / "b.csv")]}
    found = look_at_data(resolved(tmp_path, workload="mine:main", data=sources))
    assert (found.n_files, found.noun) == (2, "file")


def test_built_in_data_have_no_listing(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert not names_data(config) and look_at_data(config).n_files == 0
    assert names_data(resolved(tmp_path, params={"names": "x.txt"}))


def test_source_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"data.sources.0 is {Path.cwd()}/nothing, which does not exist"):
        look_at_data(resolved(tmp_path, data={"sources": ["nothing"]}))


def test_difference_in_words() -> None:
    old = RetrainRecord(1, "dogs", "", data="a", n_files=3, classes=("cat", "pug"))
    assert difference(old, TrainingData("b", 315, 9, ("cat", "dog"), "image")) == [
        "+312 images",
        "class pug is missing",
        "class dog is new",
    ]
    assert difference(old, TrainingData("b", 2, 9, (), "file")) == ["-1 file"]  # many folders
    old = RetrainRecord(1, "dogs", "", data="a", n_files=1, classes=tuple(f"c{number}" for number in range(7)))
    words = difference(old, TrainingData("a", 1, 9, ("c0",), "image"))
    assert words == [*(f"class c{number} is missing" for number in range(1, 6)), "and 1 more"]


def test_digest_depends_on_params_and_not_on_the_number_of_ranks(tmp_path: Path) -> None:
    first = config_digest(resolved(tmp_path, params={"epochs": 3}))
    assert first == config_digest(resolved(tmp_path, params={"epochs": 3}, cluster={"ranks": 7}))
    assert first != config_digest(resolved(tmp_path, params={"epochs": 4}))


def test_code_digest_is_that_of_the_python_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def main(ctx): ...")
    config = resolved(tmp_path, workload="mine:main")
    first = code_digest(config)
    (tmp_path / "data.csv").write_text("1")
    assert code_digest(config) == first != ""
    (tmp_path / "helper.py").write_text("x = 1")
    assert code_digest(config) != first
    assert code_digest(resolved(tmp_path)) == ""
