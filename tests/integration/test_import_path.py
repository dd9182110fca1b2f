"""Modules in the working directory are imported for the user's own code alone."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import Cli


def words(text: str) -> list[str]:
    return text.split()


# Modules that some process of a run imports, one of them at least in each kind of process.
TRAPS = words(
    """pydantic yaml wandb torch PIL json numpy typer psutil distributed dask cloudpickle cryptography logging
random safetensors fsspec dask_pytorch_ddp tensorboard torchvision requests rich obstore tempfile base64"""
)
TRACKER = """
class Sink:
    def __init__(self, options):
        self.options = options

    def start(self, facts):
        facts.tell("my tracker is here")

    def log(self, item):
        pass

    def finish(self, state):
        pass
"""


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder for which every module in tmp_path leaves a file when it is imported."""
    sprung = tmp_path / ".sprung"
    sprung.mkdir()
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(
            f"import os, sys\nopen({str(sprung)!r} + '/{name}-' + str(os.getpid()), 'w').write(str(sys.orig_argv))\n"
        )
    return sprung


def found(traps: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in traps.iterdir()}


def small(folder: Path) -> dict[str, Any]:
    """Params of a training that is soon over; a list of the user's own is looked at by a process of its own."""
    names = ["".join(letters) for letters in itertools.product("bdl", "aeu", "nrx", "aio")]
    (folder / "names.txt").write_text("\n".join(names))
    return {"names": "names.txt", "epochs": 1, "hidden_size": 8}


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # more of them wait for each other, with all of a core
SCRIPT = str(Path(sys.executable).with_name("ddptrain"))


def write_config(folder: Path, **tracking: Any) -> None:
    config = {
        "workload": "petnames",
        "cluster": {"ranks": 2, "gpus": 0},
        "params": small(folder),
        "tracking": tracking,
    }
    (folder / "run.yml").write_text(json.dumps(config))


def test_training_of_names_imports_nothing_from_the_working_directory(
    tmp_path: Path, run_cli: Cli, traps: Path
) -> None:
    write_config(tmp_path)
    trained = run_cli("train", "run.yml", env=ONE_THREAD)
    assert found(traps) == {}
    assert trained.rc == 0, trained.stderr


@pytest.mark.slow
def test_tracker_of_the_user_is_found_and_nothing_else_is(tmp_path: Path, run_cli: Cli, traps: Path) -> None:
    """Also where the import path has empty entries, which are the working directory; and when the run is sent.

    W&B refuses the key, if it comes that far: what counts is what its process has imported.
    """
    (tmp_path / "mine.py").write_text(TRACKER)
    trackers: dict[str, Any] = {"wandb": {"mode": "process"}, "tensorboard": {"mode": "rank0"}}
    write_config(tmp_path, **trackers, other=[{"name": "mine:Sink"}])
    env = {"PYTHONPATH": f":{Path(__file__).parent}:"} | ONE_THREAD
    trained = run_cli("train", "run.yml", env=env | {"WANDB_MODE": "offline"})
    assert found(traps) == {}
    assert trained.rc == 0, trained.stderr
    assert "my tracker is here" in trained.stderr
    for command in (("results", "list"), ("results", "show", "latest"), ("generate", "latest", "--count", "2")):
        done = run_cli(*command, env=env)
        assert found(traps) == {}
        assert done.rc == 0, done.stderr
    env |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    run_cli("results", "sync", "latest", "--timeout", "5", env=env)
    assert found(traps) == {}


def test_training_on_images_imports_nothing_from_the_working_directory(
    tmp_path: Path, run_cli: Cli, traps: Path
) -> None:
    for number in range(40):
        path = tmp_path / "pictures" / ("green", "red")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (255, 0, 0) if number % 2 else (0, 255, 0)).save(path)
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 1, "batch_size": 8}
    config = {"workload": "images", "cluster": {"ranks": 2, "gpus": 0}, "params": {"source": "pictures", **small}}
    (tmp_path / "run.yml").write_text(json.dumps(config))
    trained = run_cli("train", "run.yml", env={"PYTHONPATH": ":"} | ONE_THREAD)
    assert found(traps) == {}
    assert trained.rc == 0, trained.stderr


FUNCTION = """
import helper

def train(ctx):
    print("helper says", helper.WORD, flush=True)
"""


@pytest.mark.parametrize("program", [(sys.executable, "-m", "ddptrain"), (SCRIPT,)])
def test_function_of_the_user_finds_its_folder_and_the_working_directory(
    tmp_path: Path, run_cli: Cli, program: tuple[str, ...]
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/work.py").write_text(FUNCTION)
    (tmp_path / "helper.py").write_text("WORD = 'hello'")
    config = {"workload": "work:train", "cluster": {"ranks": 1, "gpus": 0}}
    (tmp_path / "configs/run.yaml").write_text(json.dumps(config))
    trained = run_cli("train", "configs/run.yaml", program=program, env={"PYTHONPATH": ""})
    assert trained.rc == 0, trained.stderr
    assert "helper says hello" in trained.stdout


def test_script_finds_what_an_empty_entry_of_the_path_names(tmp_path: Path, run_cli: Cli) -> None:
    """As torchrun's processes do: Python takes the entry for the working directory."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/job.py").write_text("import helper\nprint('helper says', helper.WORD, flush=True)")
    (tmp_path / "helper.py").write_text("WORD = 'hello'")
    trained = run_cli("run", "--ranks", "1", "scripts/job.py", env={"PYTHONPATH": ":/nowhere:"})
    assert trained.rc == 0, trained.stderr
    assert "helper says hello" in trained.stdout
    assert run_cli("run", "--ranks", "1", "scripts/job.py", env={"PYTHONPATH": "/nowhere"}).rc == 1
