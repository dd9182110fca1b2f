"""Runs a function in a fresh process, for a library that may block, start threads, or leave connections behind.

The process is `python -m` of this module. It gets a request as a line of JSON, and sends answers as lines of JSON. It
ends when its stdin is closed, that is, when its parent has ended, and can be killed at any time; what it has started
ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from ddptrain.errors import ClusterError, DdptrainError, limit_error
from ddptrain.protocol.exec_env import without_working_directory

_END_S = 5.0


class Isolated:
    """A call of `function`, named as "package.module:name", in a process of its own, which ends with the block.

    The function is called with `request` and with a function that sends an answer; both are JSON values.
    """

    def __init__(self, function: str, request: object, environ: Mapping[str, str] = os.environ) -> None:
        """Start it. Raises OSError if there can't be a process."""
        line = json.dumps([function, request]) + "\n"  # raises TypeError before there is a process
        env = without_working_directory(environ)
        # A program may have extended its import path; the working directory is left out.
        own = [entry for entry in sys.path if os.path.isabs(entry)]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, [env.get("PYTHONPATH")]), *own]))
        self._is_late = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the parent only
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has died: answers() reports it
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def answers(self, timeout_s: float | None = None) -> Iterator[Any]:
        """Yield what the function sends, until it has returned; the process is killed after `timeout_s`.

        Raises the DdptrainError of the function; RuntimeError with the traceback of any other exception; TimeoutError;
        ClusterError if the process has died.
        """
        timer = threading.Timer(timeout_s, self._kill_late) if timeout_s is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if not line.endswith("\n"):
                    break  # it was killed while it wrote
                message = json.loads(line)
                if "error" in message:
                    raise _error(*message["error"])
                yield message["answer"]
            status = self._process.wait()
            if self._is_late:
                raise TimeoutError(f"no end within {timeout_s:g} s")
            if status:
                raise ClusterError(f"the process has ended with {status}")  # of a signal, if negative
        finally:
            if timer is not None:
                timer.cancel()

    def _kill_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe and pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error(module: str, name: str, message: str, exit_code: int) -> Exception:
    """Return the error of the process; all but those of ddptrain become RuntimeError."""
    kind = getattr(import_module(module), name) if module else RuntimeError
    error: Exception = kind.__new__(kind, message)
    if isinstance(error, DdptrainError):
        error.exit_code = exit_code
    return error


# --- the process ---


def main() -> None:
    """Call the function that stdin names. Ends the process."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    function, request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def send(message: object) -> None:
        with lock:
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    try:
        module, _, name = function.partition(":")
        getattr(import_module(module), name)(request, lambda answer: send({"answer": answer}))
    except Exception as error:
        known = error if isinstance(error, DdptrainError) else limit_error(error)
        if known is None:
            send({"error": ["", "", traceback.format_exc(), 0]})
        else:
            send({"error": [type(known).__module__, type(known).__qualname__, str(known), int(known.exit_code)]})
    os._exit(0)  # threads of a library may still wait for a server


def _end_with_parent() -> None:
    while sys.stdin.read(4096):
        pass
    os.killpg(0, signal.SIGKILL)  # this process leads its group


if __name__ == "__main__":
    main()
