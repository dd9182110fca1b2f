"""How the integration tests are spread over the test processes, and how they start other processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.child_forks import can_fork_siblings
from tests.fork_server import ForkServer, ServerForks

_POPEN = subprocess.Popen


@pytest.fixture(scope="session", autouse=True)
def forked_children(fork_server: ForkServer) -> Iterator[None]:
    """Have the fork server start what tests start by `subprocess.Popen`, where that makes no difference."""
    if can_fork_siblings():
        ServerForks(fork_server).install()
    yield
    subprocess.Popen = _POPEN  # type: ignore[misc]


@pytest.fixture(autouse=True)
def real_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start programs as users do in tests that are marked so."""
    if request.node.get_closest_marker("real_start"):
        monkeypatch.setattr(subprocess, "Popen", _POPEN)


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
