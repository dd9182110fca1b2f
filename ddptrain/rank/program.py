"""Replaces the rank's process by a program that is not Python: `ddptrain run --no-python`."""

import os
import sys

if __name__ == "__main__":
    os.execvp(sys.argv[1], sys.argv[1:])
