"""Which modules a process has imported before its program begins. Must be imported before all other modules."""

from __future__ import annotations

import sys

MODULES = frozenset(sys.modules)
