"""For tests that draw their examples: the same ones everywhere, however long a busy machine takes for one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ddptrain",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ddptrain")
