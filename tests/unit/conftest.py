"""For tests that draw their examples: the same ones everywhere.

With `--hypothesis-profile nightly` they are others each time. No example has a limit of time: a busy
machine may take long for one.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

for name, is_fixed in (("ddptrain", True), ("nightly", False)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=is_fixed,
        print_blob=not is_fixed,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("ddptrain")
