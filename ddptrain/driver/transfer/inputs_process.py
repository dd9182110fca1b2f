"""The process that prepares a run's inputs: reads a request from stdin, and writes JSON lines to stdout.

It ends when stdin is closed, that is, when the driver has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ddptrain.errors import DdptrainError, ExitCode


def main() -> None:
    """Handle one request. The last message is {"done": true} or {"failed": {"message", "exit_code"}}."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the messages
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def send(**message: object) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        prepare(request, lambda line: send(tell=line))
    except DdptrainError as error:
        send(failed={"message": str(error), "exit_code": int(error.exit_code)})
    except OSError as error:  # the run directory cannot be written
        send(failed={"message": f"the run's inputs can't be prepared: {error}", "exit_code": int(ExitCode.CLUSTER)})
    except Exception:  # a bug in the workload's function: the driver reports the traceback
        send(failed={"message": traceback.format_exc(), "exit_code": int(ExitCode.INTERNAL)})
    else:
        send(done=True)
    os._exit(0)  # threads of a library may still wait for a store


def prepare(request: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Call the workload's function with the parameters and the folder to fill."""
    module, _, attribute = str(request["target"]).partition(":")
    getattr(import_module(module), attribute)(request["params"], Path(request["folder"]), tell)


def _end_with_stdin() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(1)  # the driver has ended


if __name__ == "__main__":
    main()
