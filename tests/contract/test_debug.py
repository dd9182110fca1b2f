"""--debug connects the terminal, or a pipe, to pdb in one rank; the other ranks wait, whatever the time limits are."""

from __future__ import annotations

import json
import os
import pty
import re
import socket

import pytest

from tests.contract.conftest import Project
from tests.support.command import PATIENCE_S, Running

SCRIPT = """
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    number = 40 + distributed.get_rank()
    mesh = distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    group = mesh.get_group("ranks")._get_backend(torch.device("cpu"))
    breakpoint()
    total = torch.tensor(number)
    distributed.all_reduce(total)
    print("sum", total.item())
"""
SLOW = """
    import datetime, sys, time
    import torch
    from torch import distributed


    def train(ctx, fault=""):
        group = distributed.new_group(timeout=datetime.timedelta(seconds=1))
        number = 40 + ctx.rank
        if fault == "input" and ctx.rank == 0:
            print("answer:", input("name? "))
        elif fault == "set_trace":
            import pdb; pdb.set_trace()
        elif fault:
            raise ValueError(f"no luck {number}")
        else:
            breakpoint()
        distributed.all_reduce(torch.ones(1), group=group)
        ctx.log({"loss": float(number)}, step=1)
"""


def test_script_is_debugged_with_commands_of_a_pipe(project: Project, shared_cluster: str) -> None:
    script = project.write("job.py", SCRIPT)
    command = "run", "--debug", "--cluster", shared_cluster, "--ranks", "2", script
    done = project(*command, stdin="p number\np group.options._timeout.days\nnext\np total * 2\nc\n", rc=0)
    assert "(Pdb) 40\n" in done.stdout and "(Pdb) tensor(80)\n" in done.stdout
    assert "(Pdb) 7\n" in done.stdout, "the groups of a mesh wait longer, too"
    assert "[rank 1] sum 81\n" in done.stdout
    assert re.search(r"^(\(Pdb\) )?sum 81$", done.stdout, re.MULTILINE), "lines of the debugged rank have no prefix"


def test_others_wait_longer_than_every_limit(project: Project, shared_cluster: str) -> None:
    limits = {"failure": {"hang_timeout_s": 1}, "dist": {"timeout_s": 1}}
    command = "train", project.function(SLOW, **limits), "--debug", "1", "--cluster", shared_cluster, "--ranks", "2"
    typed = "import time; time.sleep(4)\np number\nc\n"
    done = project(*command, stdin=typed, rc=0)
    assert "(Pdb) 41\n" in done.stdout
    assert project.record()["status"] == "succeeded"


def test_quit_ends_the_run_in_one_line(project: Project, shared_cluster: str) -> None:
    command = "train", project.function(SLOW), "--debug", "--cluster", shared_cluster, "--ranks", "2"
    for typed in ("q\n", ""):  # the end of the input, too
        done = project(*command, stdin=typed, rc=130)
        assert re.search(r"run \S+ stopped: the debugger was quit at work.py:\d+ in train", done.stderr), done.stderr
        assert "BdbQuit" not in done.stdout + done.stderr
    record = project.record()
    assert (record["status"], record["exit_code"]) == ("cancelled", 130)


def test_exception_opens_the_debugger_before_the_others_are_stopped(project: Project, shared_cluster: str) -> None:
    config = project.function(SLOW, params={"fault": "raise"}, failure={"max_restarts": 1})
    typed = "import time; time.sleep(3)\np number\nup\nq\n"
    done = project("train", config, "--debug", "--cluster", shared_cluster, "--ranks", "2", stdin=typed, rc=1)
    assert "(Pdb) 40\n" in done.stdout
    assert re.search(r"run \S+ failed: rank [01] on \S+ failed first: ValueError: no luck 4", done.stderr)
    assert len(project.record()["attempts"]) == 1, "the ranks are not started again"


def test_failure_is_reported_if_the_debugger_cannot_print(project: Project, shared_cluster: str) -> None:
    code = "def train(ctx):\n    import sys\n    sys.stdout.close()\n    raise ValueError('no luck')\n"
    command = "train", project.function(code), "--debug", "--cluster", shared_cluster, "--ranks", "1"
    assert "ValueError: no luck" in project(*command, stdin="q\n", rc=1).stderr


def test_input_of_the_code_is_read_from_the_terminal(project: Project, shared_cluster: str) -> None:
    config = project.function(SLOW, params={"fault": "input"})
    done = project("train", config, "--debug", "--cluster", shared_cluster, "--ranks", "1", stdin="Rex\n", rc=0)
    assert "name? answer: Rex\n" in done.stdout


@pytest.mark.parametrize("fault", ["", "set_trace"])
def test_breakpoint_without_debug_names_the_option(project: Project, shared_cluster: str, fault: str) -> None:
    config = project.function(SLOW, params={"fault": fault})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=1)
    assert "--debug" in done.stderr and "PYTHONBREAKPOINT=0" in done.stderr
    if not fault:
        project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--set", "env.PYTHONBREAKPOINT=0", rc=0)


def test_debug_that_cannot_work_is_refused(project: Project, shared_cluster: str) -> None:
    config = project.function(SLOW)
    run = "train", config, "--cluster", shared_cluster, "--ranks", "2"
    assert "--listen PORT" in project(*run, "--debug", rc=2).stderr, "stdin is empty"
    assert "ranks 0 to 1" in project(*run, "--debug", "2", rc=2, stdin="c\n").stderr
    for option in ("--detach", "--submit"):
        assert f"leave {option} out" in project(*run, "--debug", option, rc=2, stdin="c\n").stderr
    assert "--listen x:y" in project(*run, "--debug", "--listen", "x:y", rc=2).stderr
    assert not project.run_directories()


class Terminal:
    """A pseudo-terminal that is the stdin of a command."""

    def __init__(self, project: Project, *args: str) -> None:
        self.master, inside = pty.openpty()
        self.running: Running = project.start(*args, stdin=inside)
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_ctrl_c_opens_the_debugger(project: Project, shared_cluster: str) -> None:
    code = """
        import time

        def train(ctx):
            go_on = True
            time.sleep(0.5)  # the driver knows that the work has begun
            print("begins")
            while go_on:
                time.sleep(0.05)
                ctx.mean(1.0) if ctx.world_size > 1 else None
            print("ends")
    """
    terminal = Terminal(
        project, "train", project.function(code), "--debug", "--cluster", shared_cluster, "--ranks", "1"
    )
    running = terminal.running
    running.wait_for("begins")
    running.wait_for("ddptrain: training")  # the driver knows it, too
    os.kill(running.popen.pid, 2)
    running.wait_for("(Pdb) ")
    terminal.type("up\nup\ngo_on = False\n")
    os.kill(running.popen.pid, 2)  # at the prompt: it stays
    running.wait_for("KeyboardInterrupt")
    terminal.type("p 6 * 7\n")
    running.wait_for("42")
    terminal.type("q\n")
    assert running.finish().rc == 130
    os.close(terminal.master)


@pytest.mark.parametrize("by_command", [False, True])
def test_run_whose_debugger_waits_is_ended(project: Project, shared_cluster: str, by_command: bool) -> None:
    inside, outside = os.pipe()  # stays open
    command = "train", project.function(SLOW), "--debug", "--cluster", shared_cluster, "--ranks", "1"
    running = project.start(*command, stdin=inside)
    running.wait_for("(Pdb) ")
    if by_command:
        project("stop", "--now", "latest", rc=0)
    else:
        os.kill(running.popen.pid, 15)
    done = running.finish()
    os.close(inside)
    os.close(outside)
    assert done.rc == (130 if by_command else 143) and "Fatal Python error" not in done.stderr


def test_editor_that_connects_lets_the_code_begin(project: Project, shared_cluster: str) -> None:
    pytest.importorskip("debugpy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = project.function("def train(ctx):\n    print('begun')\n")
    command = "train", config, "--debug", "--listen", str(port), "--cluster", shared_cluster, "--ranks", "1"
    running = project.start(*command)
    running.wait_for(f'"port": {port}')
    with socket.create_connection(("127.0.0.1", port)) as editor:
        editor.settimeout(PATIENCE_S)
        received = b""
        request(editor, 1, "initialize", {"adapterID": "test"})
        request(editor, 2, "attach", {"name": "a rank"})
        while b'"event": "initialized"' not in received and b'"event":"initialized"' not in received:
            received += (data := editor.recv(1 << 16))
            assert data, received
        request(editor, 3, "configurationDone", {})
        assert running.finish().rc == 0
    assert "begun" in running.stdout


def request(editor: socket.socket, number: int, command: str, arguments: dict[str, str]) -> None:
    """Send a request of the Debug Adapter Protocol."""
    body = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
    editor.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
