"""GPUs are found, counted in one order, and never replaced by the CPU without a word. The driver is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.conftest import Project, lines
from tests.support.command import wait_until

SCRIPT = """\
    import os, time
    time.sleep(float(os.environ.get("TEST_SLEEP_S", "0")))
    print("sees", os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER"), flush=True)
"""


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which NVML finds two GPUs."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    searched = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(searched)}


def script(project: Project, **config: object) -> str:
    project.write("show.py", SCRIPT)
    project.write("show.yaml", json.dumps({"name": "show", "workload": {"script": "show.py"}, **config}))
    return "show.yaml"


def test_gpus_that_can_not_be_listed_are_an_error_and_not_the_cpu(project: Project) -> None:
    config = script(project)
    hidden = {"CUDA_VISIBLE_DEVICES": "0,1", "LD_LIBRARY_PATH": ""}
    failed = project("train", config, env=hidden, rc=4)
    assert "CUDA_VISIBLE_DEVICES is 0,1" in failed.stderr and "cluster.gpus" in failed.stderr
    project("train", config, "--set", "cluster.gpus=0", "--ranks", "1", "--dry-run", env=hidden, rc=0)


def test_reason_of_the_driver_is_named(project: Project, nvml: dict[str, str]) -> None:
    failed = project("train", script(project), env={**nvml, "CUDA_VISIBLE_DEVICES": "1", "FAKE_NVML_INIT": "9"}, rc=4)
    assert "Driver Not Loaded" in failed.stderr


def test_every_gpu_of_nvml_is_a_slot_counted_as_nvml_counts(project: Project, nvml: dict[str, str]) -> None:
    done = project("train", script(project), "--output", "plain", env=nvml, rc=0)
    # A script sees the GPUs of its host: LOCAL_RANK is an index into them.
    assert done.stdout.count("sees 0,1 PCI_BUS_ID") == 2, done.stdout
    assert project.record()["world_size"] == 2


@pytest.mark.long
def test_metric_that_fails_once_is_asked_for_again(project: Project, nvml: dict[str, str]) -> None:
    config = script(project)
    project("train", config, "--ranks", "1", env={**nvml, "TEST_SLEEP_S": "8"}, rc=0)
    samples = lines(project.run_directories()[-1] / "system.jsonl")
    assert 42 in [sample.get("gpu_percent") for sample in samples], samples


@pytest.mark.long
def test_ranks_with_and_without_a_gpu_do_not_train_together_on_the_cpu(project: Project) -> None:
    config = script(project)
    up = project("cluster", "up", "--name", "mixed", "--ranks", "1", "--gpus", "0", "--json", rc=0)
    address = json.loads(up.stdout)["address"]
    worker = [sys.executable, "-m", "ddptrain.worker", "--scheduler", address, "--slots", "1", "--gpus", "0"]
    with subprocess.Popen([*worker, "--name", "second"], stderr=subprocess.DEVNULL) as second:
        try:
            wait_until(lambda: json.loads(project("cluster", "status", "--json", rc=0).stdout)[0]["slots"] >= 2)
            refused = project("train", config, "--cluster", "mixed", rc=4)
            assert "only 1 of 2 ranks would have a GPU" in refused.stderr
            project("train", config, "--cluster", "mixed", "--set", "cluster.gpus=0", rc=0)
        finally:
            project("cluster", "down", "mixed", "--now", rc=0)
            second.terminate()


@pytest.mark.long
def test_doctor_does_not_blame_gpus_that_the_user_hides(project: Project, nvml: dict[str, str]) -> None:
    done = project("doctor", "--json", env={**nvml, "CUDA_VISIBLE_DEVICES": ""})
    (gpus,) = [check for check in json.loads(done.stdout)["checks"] if check["subject"] == "GPUs"]
    assert gpus["result"] == "ok" and "hides 2" in gpus["text"]


@pytest.mark.long
def test_doctor_names_gpus_that_can_not_be_listed(project: Project) -> None:
    done = project("doctor", "--json", env={"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": ""}, rc=4)
    (gpus,) = [check for check in json.loads(done.stdout)["checks"] if check["subject"] == "GPUs"]
    assert gpus["result"] == "bad" and "CUDA_VISIBLE_DEVICES is 0" in gpus["text"]


def test_run_without_options_starts_one_rank_as_torchrun_and_says_how_to_use_all_gpus(
    project: Project, nvml: dict[str, str]
) -> None:
    project.write("show.py", SCRIPT)

    def dry_run(*args: str) -> tuple[str, str]:
        done = project("run", "--dry-run", *args, "show.py", env=nvml, rc=0)
        return done.stdout, done.stderr

    config, notice = dry_run()
    assert "ranks: 1" in config and "2 GPUs: --nproc-per-node gpu" in notice
    config, notice = dry_run("--nproc-per-node", "gpu")
    assert "2 ranks" in config and not notice
