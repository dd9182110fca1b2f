"""The backend slurm with stand-ins for its commands: what is submitted, what is said, what is cancelled."""

from __future__ import annotations

import dataclasses
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from ddptrain.clusters import cluster_records
from ddptrain.clusters.backends import slurm
from ddptrain.clusters.backends.slurm import JobPlan, SlurmProvider, scheduler_lines, script, worker_lines
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.scheduler import slots
from ddptrain.config.sections.clusters import ClusterConfig, SlurmSettings
from ddptrain.errors import ClusterError, UsageError
from ddptrain.worker import driver_calls

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


class Client:
    """Stands for a connection to the scheduler of a cluster with these workers: name, slots, slots in use."""

    def __init__(self, *workers: tuple[str, int, int]) -> None:
        self.workers = [
            {"name": name, "address": f"tcp://{name}", "slots": slots, "held": held} for name, slots, held in workers
        ]
        self.calls: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("closed")

    def run_on_scheduler(self, function: Any) -> dict[str, Any]:
        assert function is slots.overview
        return {"workers": self.workers}

    def run(self, function: Any, *arguments: Any, workers: list[str]) -> None:
        assert function is driver_calls.set_slots
        self.calls.append((*arguments, *workers))


def resized(monkeypatch: pytest.MonkeyPatch, made: Deployment, client: Client, wanted: int) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(slurm, "client_of", lambda cluster: client)
    SlurmProvider().scale(made, wanted, told.append)
    assert client.calls.pop() == "closed"
    return told


@pytest.mark.parametrize(
    ("workers", "wanted", "nodes", "each"),
    [
        ([("n1-17", 4, 0), ("n2-17", 2, 0)], 7, 1, 1),  # one slot is missing
        ([("n1-17", 4, 0), ("n2-17", 2, 0)], 11, 2, 4),  # as many a node as the largest worker has
        ([("n1-17", 4, 0)], 8, 1, 4),
        ([], 2, 2, 1),
    ],
)
def test_missing_slots_are_a_further_job(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    workers: list[tuple[str, int, int]],
    wanted: int,
    nodes: int,
    each: int,
) -> None:
    fake("sbatch", "echo 18")
    made = cluster()
    made.update(parts={"jobs": ["17"]})
    told = resized(monkeypatch, made, Client(*workers), wanted)
    assert told == [f"job 18: {nodes} workers more"] and made.record.parts["jobs"] == ["17", "18"]
    assert made.record.workers == len(workers) + nodes
    text = (made.folder / "job-2.sh").read_text()
    assert f"#SBATCH --array=0-{nodes - 1}\n" in text and f"--slots {each} " in text


WORKERS = (("n1-17", 4, 0), ("n2-18_0", 4, 0), ("n3-18_1", 4, 0), ("n4-19", 4, 0))


@pytest.mark.parametrize(
    ("held", "wanted", "cancelled", "calls", "left"),
    [
        ({}, 16, [], [], 4),
        ({}, 12, ["19"], [], 3),  # the last job first
        ({}, 13, [], [(1, "tcp://n4-19")], 4),  # no whole job
        ({}, 4, ["19", "18"], [], 1),
        ({}, 3, ["19", "18"], [(3, "tcp://n1-17")], 1),
        ({"n4-19": 1}, 8, ["18"], [], 2),
        ({"n3-18_1": 1}, 8, ["19"], [(1, "tcp://n3-18_1"), (3, "tcp://n2-18_0")], 3),
        # Every worker keeps a slot: the first job ends with the cluster alone.
        ({"n4-19": 1, "n2-18_0": 1}, 1, [], [(1, f"tcp://{name}") for name, _, _ in reversed(WORKERS)], 4),
    ],
)
def test_spare_slots_are_jobs_without_runs_and_then_slots_of_the_last_workers(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    held: dict[str, int],
    wanted: int,
    cancelled: list[str],
    calls: list[Any],
    left: int,
) -> None:
    notes = fake("scancel", "true")
    made = cluster()
    made.update(parts={"jobs": ["17", "18", "19"]})
    client = Client(*((name, slots, held.get(name, 0)) for name, slots, _ in WORKERS))
    assert resized(monkeypatch, made, client, wanted) == [f"cancelled job {job}" for job in cancelled]
    assert (notes.read_text().split() if notes.exists() else []) == cancelled
    assert client.calls == calls and made.record.workers == left
    assert made.record.parts["jobs"] == [job for job in ("17", "18", "19") if job not in cancelled]


def test_files_of_jobs_are_in_the_shared_folder_and_go_with_the_cluster(fake: Fake, tmp_path: Path) -> None:
    fake("sbatch", "echo 17")
    fake("scancel", "true")
    fake("squeue", "true")
    made = cluster({"folder": str(tmp_path / "shared"), "env": {"A": "1"}})
    for name in ("cert.pem", "key.pem"):
        (made.folder / name).write_text(name)
    SlurmProvider().scale(made, None, lambda text: None)
    (folder,) = (tmp_path / "shared").iterdir()
    assert folder.name.startswith("ddptrain-dev-") and folder.stat().st_mode & 0o777 == 0o700
    assert made.record.parts == {"folder": str(folder), "jobs": ["17"]}
    assert sorted(path.name for path in folder.iterdir()) == ["cert.pem", "job-1.sh", "key.pem"]
    assert (folder / "key.pem").read_text() == "key.pem" and (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    text = (folder / "job-1.sh").read_text()
    assert f"--tls-dir {folder}" in text and f"--folder {folder}" in text
    (folder / "scheduler.json").write_text("{}")
    assert (made.folder / "scheduler.json").read_text() == "{}"
    assert (made.folder / "ended.json").readlink() == folder / "ended.json"
    SlurmProvider().stop(made, lambda text: None)
    assert not folder.exists() and made.folder.exists()


def test_shared_folder_that_cant_be_made_is_told(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ClusterError, match=rf"cluster\.slurm\.folder {tmp_path / 'file'} can't be used: Not a directory"
    ):
        SlurmProvider().scale(cluster({"folder": str(tmp_path / "file")}), None, lambda text: None)


def test_logs_have_the_name_of_their_process(fake: Fake) -> None:
    fake("squeue", "echo '17|RUNNING|None'; echo '18|PENDING|None'; echo 'slurm_load_jobs: hint'")
    made = cluster()
    made.update(parts={"jobs": ["17", "18"]})
    for name, text in {"scheduler": "a\nb\nc\n", "worker-n1-17": "d\n", "job-17": "e\n", "job-18": "f\n"}.items():
        (made.folder / f"{name}.log").write_text(text)
    assert SlurmProvider().logs(made, 2) == {
        "job 17": "e\n",
        "job 18": "f\njob 18 is PENDING\n",
        "scheduler": "b\nc\n",
        "worker n1-17": "d\n",
    }


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo a >&2; echo 'sbatch: b' >&2; exit 3", "sbatch --parsable: sbatch: b"),
        ("exit 3", "sbatch --parsable: exit code 3"),
    ],
)
def test_command_that_fails_is_told_with_its_last_line(fake: Fake, script: str, told: str) -> None:
    fake("sbatch", script)
    with pytest.raises(ClusterError) as failed:
        SlurmProvider().scale(cluster(), None, lambda text: None)
    assert str(failed.value) == told


def test_command_that_does_not_answer_is_ended(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_COMMAND_S", 0.05)
    fake("squeue", "exec sleep 60")
    with pytest.raises(ClusterError, match=r"^squeue did not answer within 0\.05 s: is Slurm's controller down\?$"):
        slurm._listed(["17"])


def test_jobs_that_do_not_end_are_told_with_their_state(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_END_S", 0.0)
    fake("scancel", "true")
    fake("squeue", "echo '17|COMPLETING|None'; echo '18|RUNNING|'")
    made = cluster()
    made.update(parts={"jobs": ["17", "18"]})
    with pytest.raises(
        ClusterError, match=r"^Slurm has not ended within 0 s: job 17 is COMPLETING; job 18 is RUNNING$"
    ):
        SlurmProvider().stop(made, lambda text: None)


def test_script_has_each_setting_as_a_directive(tmp_path: Path) -> None:
    slurm_settings = SlurmSettings(
        partition="p", account="a", time="1:00", gres="gpu:2", directives=["#SBATCH --x=1", "--y"]
    )
    plan = JobPlan(
        "n", tmp_path, 2, 3, "python", tls=False, gpus=True, start_timeout_s=90.0, slurm=slurm_settings.model_dump()
    )
    lines = script(plan, ["exit"]).splitlines()
    assert lines == [
        "#!/bin/bash",
        *("#SBATCH --job-name=n", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"),
        *(f"#SBATCH --output={tmp_path}/job-%j.log", "#SBATCH --open-mode=append"),
        *("#SBATCH --partition=p", "#SBATCH --account=a", "#SBATCH --time=1:00"),
        *("#SBATCH --gres=gpu:2", "#SBATCH --cpus-per-task=3"),
        *("#SBATCH --x=1", "#SBATCH --y", "", "umask 077", "exit"),
    ]
    array = script(plan.as_array(3), [])
    assert f"#SBATCH --output={tmp_path}/job-%A_%a.log\n" in array and "#SBATCH --array=0-2\n" in array
    assert "#SBATCH --nodes=1\n" in array and "#SBATCH --nodes=4\n" in script(dataclasses.replace(plan, nodes=4), [])


def test_worker_gets_its_cpus_and_limits(tmp_path: Path) -> None:
    def run(slots: int | None) -> str:
        given = SlurmSettings().model_dump()
        plan = JobPlan("n", tmp_path, 1, slots, "python", tls=False, gpus=True, start_timeout_s=90.0, slurm=given)
        return worker_lines(plan)[0]

    assert run(3).startswith("srun --mpi=none --wait=0 --kill-on-bad-exit=0 --cpu-bind=none --export=ALL")
    assert "--input=none --cpus-per-task=3 bash -c" in run(3)
    assert "--cpus-per-task" not in run(None)
    assert "--timeout 90 --slots 0 --gpus auto --name" in run(None)


def test_scheduler_that_shares_its_job_ends_with_it(tmp_path: Path) -> None:
    plan = JobPlan("n", tmp_path, 1, 1, "python", tls=False, gpus=False, start_timeout_s=5, slurm={})
    (alone,) = scheduler_lines(plan, 60.0)
    command = (
        f"python -P -m ddptrain.clusters.scheduler.scheduler_process --folder {tmp_path} --idle-timeout 60.0 --host"
    )
    assert alone.startswith(f"exec {command} ") and alone.endswith(f">>{tmp_path}/scheduler.log 2>&1")
    assert scheduler_lines(plan, 60.0, alone=False) == [
        f"{alone.removeprefix('exec ')} &",
        "scheduler=$!",
        "trap 'kill $scheduler; wait $scheduler' EXIT",
    ]


def test_each_job_is_listed_once_even_if_it_shares_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array has a row for each of its tasks; the newest one counts."""
    rows = "17 | PENDING|Priority \n18|PENDING|Priority\n18|RUNNING|None\nslurm: a warning\n"
    calls: list[tuple[Any, ...]] = []

    def call(*words: str, **_: Any) -> str:
        calls.append(words)
        return rows

    monkeypatch.setattr(slurm, "_call", call)
    assert slurm._listed(["17", "18"]) == [slurm.Job("17", "PENDING", "Priority"), slurm.Job("18", "RUNNING", "None")]
    assert calls == [("squeue", "--noheader", "--jobs", "17,18", "--format", "%F|%T|%r")]
    assert slurm._listed([]) == [] and len(calls) == 1
