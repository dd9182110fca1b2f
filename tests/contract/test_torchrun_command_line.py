"""`ddptrain run` takes the command line of torchrun: every option of torch's own parser, and the PET_* variables."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.contract.conftest import Project

# Values of options that do not take any text.
VALUES = {
    "nnodes": "1",
    "nproc_per_node": "2",
    "max_restarts": "3",
    "log_dir": "logs",
    "redirects": "0",
    "tee": "3",
    "local_ranks_filter": "0,1",
    "role": "trainer",
    "signals_to_handle": "SIGTERM,SIGINT",
    "shutdown_timeout": "5",
}
NOT_WITH_OTHERS = {"help", "print_completion", "module", "no_python", "training_script", "training_script_args"}
OPTIONS = [action for action in get_args_parser()._actions if action.dest not in NOT_WITH_OTHERS]
MEANT = {*VALUES, "standalone", "run_path", "virtual_local_rank"}
IGNORED = {f"--{action.dest.replace('_', '-')}" for action in OPTIONS if action.dest not in MEANT}
ECHO = """
    import os, sys
    rank, size, restarts = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    print("rank", rank, "of", size, sys.argv[1:], restarts, flush=True)
"""


def value_of(action: argparse.Action) -> str:
    return VALUES.get(action.dest) or str(next(iter(action.choices or ()), "1"))


def typed(action: argparse.Action, name: str) -> list[str]:
    return [name] if action.nargs == 0 else [name, value_of(action)]


def meant(project: Project, *args: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """Return the configuration that a command line means, and what else is said."""
    done = project("run", "--dry-run", *args, rc=0, env=env)
    return yaml.safe_load(done.stdout), done.stderr


def check_all(config: dict[str, Any], notices: str) -> None:
    assert config["workload"] == {"script": "echo.py", "args": ["--lr", "0.1"]}
    assert config["cluster"]["ranks"] == 2
    assert config["failure"] == {"max_restarts": 3, "grace_s": 5.0}
    assert config["results"] == {"dir": "logs"}
    assert config["env"] == {"ROLE_NAME": "trainer", "LOCAL_RANK": "0"}
    assert notices.count("\n") == 1, notices  # one line for all options that have no use here
    names = notices.rpartition(": ")[2].replace("PET_", "--").replace("_", "-").lower()
    assert set(names.strip().split(", ")) == IGNORED


@pytest.mark.parametrize("separator", ["-", "_"])
def test_every_option_of_torchs_own_parser_is_taken(project: Project, separator: str) -> None:
    project.write("echo.py", ECHO)
    options: list[str] = []
    for action in OPTIONS:
        name = next(name for name in action.option_strings if name.startswith("--"))
        options += typed(action, f"--{name[2:].replace('-', separator)}")
    check_all(*meant(project, *options, "echo.py", "--lr", "0.1"))


def test_pet_variables_are_read_and_the_command_line_wins(project: Project) -> None:
    project.write("echo.py", ECHO)
    env = {f"PET_{action.dest.upper()}": value_of(action) for action in OPTIONS}
    check_all(*meant(project, "echo.py", "--lr", "0.1", env=env))
    config, _ = meant(
        project,
        *("--nproc-per-node=4", "--set", "failure.max_restarts=1", "--runs-dir", "mine", "echo.py"),
        env={"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_LOG_DIR": "theirs", "PET_STANDALONE": "0"},
    )
    assert (config["cluster"]["ranks"], config["failure"], config["results"]) == (
        4,
        {"max_restarts": 1},
        {"dir": "mine"},
    )
    config, _ = meant(project, "--ranks", "2", "echo.py", env={"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"})
    assert config["cluster"]["ranks"] == 2
    config, _ = meant(project, "--standalone", "--set", "cluster.ranks=3", "echo.py", env={"PET_NPROC_PER_NODE": "8"})
    assert config["cluster"]["ranks"] == 3
    config, _ = meant(project, "echo", env={"PET_MODULE": "1"})
    assert config["workload"] == {"module": "echo"}
    refused = project("run", "--dry-run", "echo.py", env={"PET_MAX_RESTARTS": "many"}, rc=2)
    assert "PET_MAX_RESTARTS=many" in refused.stderr


def test_options_may_be_abbreviated_and_the_time_to_end_be_a_variable_of_torch(project: Project) -> None:
    project.write("echo.py", ECHO)
    config, _ = meant(
        project, "--stand", "--nproc_per", "3", "--max-r=2", "echo.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    )
    assert config["cluster"]["ranks"] == 3
    assert config["failure"] == {"max_restarts": 2, "grace_s": 7.0}


def test_torchruns_command_runs_when_its_first_word_is_replaced(project: Project) -> None:
    project.write("echo.py", ECHO)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    done = project("run", *options, "echo.py", "--nnodes", "7", "--ranks=9", "--", "x", rc=0)
    for rank in "01":
        assert f"rank {rank} of 2 ['--nnodes', '7', '--ranks=9', '--', 'x'] 3\n" in done.stdout
    assert "option" not in done.stdout + done.stderr


def test_without_a_number_a_launch_as_torchruns_has_one_rank_per_host(project: Project) -> None:
    project.write("echo.py", ECHO)
    for options in (["--standalone"], ["--nnodes", "1:4"], ["--rdzv-backend", "c10d"]):
        assert meant(project, *options, "echo.py")[0]["cluster"]["ranks"] == 1
    assert meant(project, "--max-restarts", "1", "echo.py")[0]["cluster"]["ranks"] == 1


def test_words_for_the_number_of_ranks(project: Project, shared_cluster: str) -> None:
    project.write("echo.py", ECHO)
    count, gpus = (meant(project, "--nproc-per-node", word, "echo.py")[0]["cluster"] for word in ("cpu", "auto"))
    assert count == {"ranks": count["ranks"], "gpus": 0} and count["ranks"] >= 1
    assert gpus["ranks"] == count["ranks"]  # this machine has no GPU, or the tests hide it
    config, _ = meant(project, "--cluster", shared_cluster, "--nproc-per-node", "gpu", "echo.py")
    assert config["cluster"].get("ranks", "auto") == "auto"


def test_hosts_times_ranks_of_a_host(project: Project, shared_cluster: str) -> None:
    project.write("echo.py", ECHO)
    on = ("--cluster", shared_cluster, "--nproc-per-node", "2")
    config, _ = meant(project, *on, "--nnodes", "1:2", "echo.py")
    assert config["cluster"]["ranks"] == {"min": 2, "max": 4}
    config, said = meant(project, *on, "--nnodes", "2", "echo.py")
    assert config["cluster"]["ranks"] == 4
    assert "4 ranks on the free slots of the cluster" in said
    done = project("run", "--nnodes", "2", "--nproc-per-node", "2", "echo.py", rc=2)
    assert "--nnodes 2" in done.stderr and "--cluster" in done.stderr


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--local-ranks-filter", "1"], "1"),
        (["--redirects", "3"], ""),
        (["-r3", "-t", "3"], "01"),
        pytest.param(["--tee=3", "--local_ranks_filter=0"], "0", marks=pytest.mark.long),
        (["-t", "3"], "01"),
    ],
)
def test_output_of_chosen_ranks_is_shown(project: Project, shared_cluster: str, options: list[str], shown: str) -> None:
    project.write("echo.py", ECHO)
    done = project("run", "--cluster", shared_cluster, "--nproc-per-node", "2", *options, "echo.py", rc=0)
    assert [rank for rank in "01" if f"rank {rank} of 2" in done.stdout] == list(shown)
    (run,) = project.run_directories()
    for rank in "01":  # the logs have everything
        assert f"rank {rank} of 2" in (run / "logs" / f"rank-{rank}.log").read_text()


def test_program_that_is_not_python(project: Project, shared_cluster: str) -> None:
    project.write("job.sh", 'echo "shell $RANK of $WORLD_SIZE: $*"; exit "$1"\n')
    options = ("--cluster", shared_cluster, "--nproc-per-node", "2", "--no-python", "bash", "job.sh")
    done = project("run", *options, "0", "--lr", rc=0)
    assert all(f"shell {rank} of 2: 0 --lr\n" in done.stdout for rank in "01")
    assert project.run_directories()[0].name.startswith("bash-")
    assert "exit" in project("run", *options, "3", rc=1).stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_program_that_is_not_python_gets_the_signals(
    project: Project, shared_cluster: str, number: signal.Signals, code: int
) -> None:
    project.write("job.sh", 'trap "echo saved; exit 0" INT TERM\necho ready\nsleep 60 & wait\n')
    options = ("--cluster", shared_cluster, "--nproc-per-node", "1", "--no-python", "bash", "job.sh")
    running = project.start("run", *options)
    running.wait_for("ready")
    running.popen.send_signal(number)
    done = running.finish(60.0)
    assert (done.rc, "saved" in done.stdout) == (code, True), done.stderr


def test_role_and_virtual_local_rank_are_in_the_environment(project: Project, shared_cluster: str) -> None:
    project.write(
        "env.py", 'import os\nprint(*(os.environ[n] for n in ("RANK", "LOCAL_RANK", "ROLE_NAME")), flush=True)\n'
    )
    options = ("--nproc-per-node", "2", "--role", "trainer", "--virtual-local-rank")
    done = project("run", "--cluster", shared_cluster, *options, "env.py", rc=0)
    assert all(f"{rank} 0 trainer\n" in done.stdout for rank in "01")


def test_detached_run_has_the_options_of_torchrun(project: Project, shared_cluster: str) -> None:
    project.write("echo.py", ECHO)
    options = ("--max_restarts=4", "--detach", "--nproc-per-node", "2", "--local-ranks-filter", "0")
    project("run", "--cluster", shared_cluster, *options, "echo.py", "--", "--lr", rc=0)
    done = project("results", "logs", "latest", "--follow", rc=0)
    assert all(f"rank {rank} of 2 ['--lr'] 4\n" in done.stdout for rank in "01")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--print-completion bash", "ddptrain --install-completion"),
        ("--no-python -m echo", "--no-python"),
        ("--nproc-per-node many echo.py", "--nproc-per-node many"),
        ("--nproc-per-node 0 echo.py", "--nproc-per-node 0"),
        ("--nproc-per-node gpu echo.py", "has no GPU"),
        ("--ranks 2 --nproc-per-node 2 echo.py", "--ranks is"),
        ("--nnodes 3:2 echo.py", "--nnodes 3:2"),
        ("--local-ranks-filter x echo.py", "--local-ranks-filter x"),
        ("--tee 4 echo.py", "--tee 4"),
        ("--max-restarts echo.py", "SCRIPT"),
        ("echo.py --nope", ""),
        ("--nope echo.py", "there is no option --nope"),
    ],
)
def test_what_has_no_meaning_is_refused_with_its_reason(project: Project, options: str, reason: str) -> None:
    project.write("echo.py", ECHO)
    done = project("run", "--dry-run", *options.split(), rc=2 if reason else 0, env={"CUDA_VISIBLE_DEVICES": ""})
    assert reason in done.stderr and done.stderr.count("\n") == bool(reason)


def test_file_given_as_a_module_is_answered_as_by_python(project: Project, shared_cluster: str) -> None:
    project.write("args_echo.py", ECHO)
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", "-m", "args_echo.py", rc=1)
    assert "Try using 'args_echo' instead of 'args_echo.py'" in done.stderr


def test_table_of_the_docs_has_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "script.md").read_text(encoding="utf-8")
    named = [f"--{action.dest.replace('_', '-')}" for action in get_args_parser()._actions if action.option_strings]
    assert [name for name in named if f"`{name}" not in page and name != "--help"] == []
