"""The backend slurm with stand-ins for its commands: what is submitted, what is said, what is cancelled."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters import cluster_records
from ddptrain.clusters.backends.slurm import SlurmProvider
from ddptrain.clusters.backends.slurm_script import JobPlan, script, worker_lines
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.config.sections.clusters import ClusterConfig, SlurmSettings
from ddptrain.errors import ClusterError, UsageError

Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A command that notes its arguments and runs a line of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(name: str, line: str) -> Path:
        path, notes = folder / name, tmp_path / f"{name}.calls"
        path.write_text(f'#!/bin/bash\necho "$@" >> {notes}\n{line}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return notes

    return make


def cluster(slurm: dict[str, Any] | None = None, **changes: Any) -> Deployment:
    config = ClusterConfig(backend="slurm", slurm=SlurmSettings(**(slurm or {})), **changes)
    return cluster_records.create(ClusterRecord("dev", "slurm", "now", settings=config.model_dump(mode="json")))


def scripts(made: Deployment) -> list[str]:
    return [path.read_text() for path in sorted(made.folder.glob("job-*.sh"))]


def test_first_job_holds_scheduler_and_workers(fake: Fake) -> None:
    fake("sbatch", "echo '17;site'")
    told: list[str] = []
    made = cluster({"nodes": 2, "ranks_per_node": 4, "partition": "gpu", "gres": "gpu:4", "time": "04:00:00"})
    SlurmProvider().scale(made, None, told.append)
    (text,) = scripts(made)
    for line in ("--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--gres=gpu:4", "--time=04:00:00"):
        assert f"#SBATCH {line}\n" in text
    assert "ddptrain.clusters.scheduler.scheduler_process" in text and "--slots 4 --gpus auto" in text
    assert made.record.parts["jobs"] == ["17"] and made.record.workers == 2
    assert told == ["job 17: the scheduler and 2 workers"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.folder.glob("job-*.sh"))


def test_cluster_without_settings_for_slurm_is_one_node(fake: Fake) -> None:
    """`ddptrain cluster up --backend slurm`, as the README has it."""
    fake("sbatch", "echo 17")
    settings = ClusterConfig(backend="slurm").model_dump(mode="json")
    made = cluster_records.create(ClusterRecord("dev", "slurm", "now", settings=settings))
    told: list[str] = []
    SlurmProvider().scale(made, None, told.append)
    (text,) = scripts(made)
    assert "#SBATCH --nodes=1\n" in text and told == ["job 17: the scheduler and a worker"]


def test_array_has_a_job_for_the_scheduler_and_one_for_the_workers(fake: Fake) -> None:
    fake("sbatch", "echo $RANDOM")
    made = cluster({"array": True, "nodes": 3, "ranks_per_node": 1})
    SlurmProvider().scale(made, None, lambda text: None)
    first, second = scripts(made)
    assert "ddptrain.clusters.scheduler.scheduler_process" in first and "ddptrain.worker" not in first
    assert "#SBATCH --array=0-2" in second and "#SBATCH --nodes=1" in second


@pytest.mark.parametrize(
    ("settings", "slots", "nodes", "each"),
    [
        ({"nodes": 2}, 4, 2, "--slots 2"),
        ({"nodes": 1, "ranks_per_node": 4}, 8, 2, "--slots 4"),
        ({"nodes": 2}, None, 2, "--slots 0"),
    ],
)
def test_slots_decide_how_many_nodes_there_are(
    fake: Fake, settings: dict[str, Any], slots: int | None, nodes: int, each: str
) -> None:
    fake("sbatch", "echo 1")
    made = cluster(settings)
    SlurmProvider().scale(made, slots, lambda text: None)
    assert f"#SBATCH --nodes={nodes}\n" in scripts(made)[0] and each in scripts(made)[0]


def test_settings_stay_what_they_are_in_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "a folder; touch hacked $(touch hacked)"
    folder.mkdir()
    slurm = SlurmSettings(account='x" --wrap="touch hacked', setup=["export A=1"]).model_dump(mode="json")
    plan = JobPlan("n", folder, 1, 1, "/no python", tls=True, gpus=False, start_timeout_s=5, slurm=slurm)
    text = script(plan, worker_lines(plan))
    assert '#SBATCH --account="x\\" --wrap=\\"touch hacked"' in text
    done = subprocess.run(["bash", "-c", text.replace("srun", "echo")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]


def test_what_sbatch_says_is_the_error(fake: Fake) -> None:
    fake("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    with pytest.raises(ClusterError, match="submission failed: Invalid qos"):
        SlurmProvider().scale(cluster(), None, lambda text: None)


def test_machine_without_slurm_is_told_in_a_line(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="there is no sbatch here: backend slurm needs Slurm's commands"):
        SlurmProvider().scale(cluster(), None, lambda text: None)


def test_number_of_gpus_is_a_matter_of_gres(fake: Fake) -> None:
    with pytest.raises(UsageError, match=r"cluster\.slurm\.gres asks for GPUs"):
        SlurmProvider().scale(cluster(gpus=4), None, lambda text: None)


def test_stop_cancels_every_job_and_waits_for_their_end(fake: Fake, tmp_path: Path) -> None:
    cancelled = fake("scancel", f"touch {tmp_path}/cancelled")
    fake("squeue", f"[ -e {tmp_path}/ended ] && exit 0; touch {tmp_path}/ended; echo '17|COMPLETING|None'")
    made = cluster()
    made.update(parts={"jobs": ["17", "18"]})
    told: list[str] = []
    SlurmProvider().stop(made, told.append)
    assert cancelled.read_text() == "17 18\n" and told == ["cancelled job 17, 18"]


def test_stop_of_jobs_that_slurm_has_forgotten_is_fine(fake: Fake) -> None:
    for name in ("scancel", "squeue"):
        fake(name, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    made = cluster()
    made.update(parts={"jobs": ["17"]})
    SlurmProvider().stop(made, lambda text: None)


def test_job_that_waits_says_why_and_one_that_has_ended_is_a_fault(fake: Fake) -> None:
    fake("squeue", "echo '17|PENDING|Resources'")
    made = cluster()
    made.update(parts={"jobs": ["17"]})
    provider = SlurmProvider()
    assert provider.logs(made, 5) == {"job 17": "job 17 is PENDING (Resources)\n"}
    assert provider.fault(made) is None
    fake("squeue", "true")
    assert provider.fault(made) == "job 17 has ended"
