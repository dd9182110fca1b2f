"""`python -m ddptrain` is the command `ddptrain`; neither imports from the working directory."""

import os
import sys

from ddptrain.protocol.exec_env import leave_working_directory


def main() -> int:
    """Run the command with the arguments of this process; return its exit code."""
    leave_working_directory()
    # Only now are modules imported: the working directory may contain a json.py or a pydantic.py.
    if "_DDPTRAIN_COMPLETE" in os.environ:
        from ddptrain.completion import shells

        if shells.is_asked(os.environ):
            return shells.answer(os.environ)
    from ddptrain.cli.warm import client

    if (code := client.run(sys.argv[1:], os.environ)) is not None:
        return code
    from ddptrain.cli import main as command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
