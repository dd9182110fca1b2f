"""`python -m ddptrain` is the command `ddptrain`; neither imports from the working directory."""

import sys

from ddptrain.protocol.exec_env import leave_working_directory


def main() -> int:
    """The command, with the arguments of this process; returns its exit code."""
    leave_working_directory()
    from ddptrain.cli import main as command  # not before: anybody may have put a pydantic.py there

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
