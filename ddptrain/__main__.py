"""`python -m ddptrain` is the command `ddptrain`."""

import sys

from ddptrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
