"""`python -m ddptrain` is the command `ddptrain`; neither imports from the working directory."""

import os
import sys

from ddptrain.protocol.exec_env import leave_working_directory


def main() -> int:
    """Run the command with the arguments of this process; return its exit code."""
    leave_working_directory()
    _open_closed_streams()
    # Only now are modules imported: the working directory may contain a json.py or a pydantic.py.
    from ddptrain.cli.warm import client

    if (code := client.run(sys.argv[1:], os.environ)) is not None:
        return code
    from ddptrain.cli import main as command

    return command.main()


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed: another file would get its number, and the output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: that of the stream
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 (it stays open)


if __name__ == "__main__":
    sys.exit(main())
