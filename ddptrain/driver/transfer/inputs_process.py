"""The process that prepares a run's inputs: an order on stdin, one JSON object a line on stdout; it ends with stdin."""

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
    """Do as ordered; the last word is {"done": true} or {"failed": {"message", "exit_code"}}."""
    words = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no word of ours
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def say(**word: object) -> None:
        words.write(json.dumps(word) + "\n")
        words.flush()

    try:
        prepare(order, lambda line: say(tell=line))
    except DdptrainError as error:
        say(failed={"message": str(error), "exit_code": int(error.exit_code)})
    except OSError as error:  # the run directory can't be written
        say(failed={"message": f"the run's inputs can't be prepared: {error}", "exit_code": int(ExitCode.CLUSTER)})
    except Exception:
        say(failed={"message": traceback.format_exc(), "exit_code": int(ExitCode.INTERNAL)})
    else:
        say(done=True)
    words.flush()
    os._exit(0)  # a library's threads may be waiting for a store


def prepare(order: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Call the workload's own function with the parameters and the folder to fill."""
    module, _, attribute = str(order["target"]).partition(":")
    getattr(import_module(module), attribute)(order["params"], Path(order["folder"]), tell)


def _end_with_stdin() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(1)  # the driver is gone


if __name__ == "__main__":
    main()
