"""Calls a library in a process of its own, which is killed at a deadline: a request goes in, JSON lines come out.

For libraries that block, log, print or start threads as they like. The request goes to stdin, so that no list of
processes shows the secrets in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ddptrain.errors import one_line
from ddptrain.protocol.exec_env import without_working_directory


def call(module: str, request: object, timeout_s: float) -> tuple[list[Any], str]:
    """Run `python -m MODULE`, whose main program is `serve`. Return its answers, and why it has not ended by itself.

    The second value is "" if it has. It may contain secrets of the request. Raises nothing.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", module]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s,
            env=without_working_directory(os.environ),
            start_new_session=True,  # Ctrl-C at a terminal would end it before it has answered
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return _answers(expired.stdout or b""), f"the process did not end within {timeout_s:g} s"
    except (OSError, ValueError) as error:
        return [], f"the process could not be started: {one_line(error)}"
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    problem = ": ".join([f"the process ended with {done.returncode}", *last]) if done.returncode else ""
    return _answers(done.stdout), problem


def _answers(output: bytes) -> list[Any]:
    answers = []
    for line in output.splitlines():
        with suppress(ValueError):  # it was killed while it wrote
            answers.append(json.loads(line))
    return answers


def serve(work: Callable[[Any, Callable[[object], None]], None]) -> NoReturn:
    """In the process: call `work` with the request and a function that answers, from any thread; then end the process.

    What the library prints goes to stderr. Its threads may still run at the end.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def answer(data: object) -> None:
        with lock:
            print(json.dumps(data), file=answers, flush=True)

    work(json.load(sys.stdin), answer)
    os._exit(0)
