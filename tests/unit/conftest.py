"""For tests that draw their examples: the same ones everywhere, however long a busy machine takes for one.

For tests that start schedulers and workers of Dask: a process that forks them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.child_forks import can_fork_siblings
from tests.fork_server import ForkServer

settings.register_profile(
    "ddptrain",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ddptrain")


@pytest.fixture(scope="session")
def dask_fork_server() -> Iterator[ForkServer | None]:
    """Forks schedulers and workers of Dask; None where the system does not let it."""
    if not can_fork_siblings():
        yield None
        return
    server = ForkServer(only_dask=True)
    yield server
    server.close()
