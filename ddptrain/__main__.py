"""`python -m ddptrain` is the command `ddptrain`; neither imports from the working directory."""

import os
import sys

from ddptrain.protocol.exec_env import leave_working_directory


def main() -> int:
    """Run the command with the arguments of this process; return its exit code."""
    leave_working_directory()
    from ddptrain.cli.warm import client

    if (code := client.run(sys.argv[1:], os.environ)) is not None:
        return code
    from ddptrain.cli import main as command  # only now: the working directory may contain a pydantic.py

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
