"""How the integration tests are spread over the test processes."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file that share a server (a fixture of the module) in one process; others go anywhere.

    Slow tests begin first. Otherwise one process would still run them when the others have nothing left to do.
    """
    for item in items:
        definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009  # there is no public way
        if any(one.scope == "module" for found in definitions.values() for one in found):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
