"""`python -m tests.servers.with_limit SECONDS MODULE ARGUMENT...`: a module with this default of lost_after_s.

A run does not change the limits of a cluster that it attaches to.
"""

from __future__ import annotations

import runpy
import sys

from ddptrain.protocol import rank_spec

if __name__ == "__main__":
    setattr(rank_spec, "LOST_AFTER_S", float(sys.argv.pop(1)))  # noqa: B010  # not a constant here
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
