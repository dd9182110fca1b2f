"""All problems, in the order of the page."""

from __future__ import annotations

from tests.pains.failing import (
    exit_minus_9, exit_zero, hang, import_error, missing_call, root_cause, uneven_data,
)  # fmt: skip
from tests.pains.problem import Problem

PROBLEMS: tuple[Problem, ...] = tuple(
    module.PROBLEM
    for module in (root_cause, hang, exit_minus_9, exit_zero, missing_call, uneven_data, import_error)
)
