"""Runs a program that is not Python in a rank: `ddptrain run --no-python`. It gets the rank's signals."""

import os
import signal
import subprocess
import sys


def main() -> None:
    """Run the program that the arguments name, and end as it does."""
    child = subprocess.Popen(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the program has got them: they go to the group
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
