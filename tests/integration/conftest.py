"""How the integration tests are spread over the test processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class _Units(LoadScopeScheduling):  # type: ignore[misc]  # without type hints
    """A unit of work is a file whose tests share a server (a fixture of the module), or one test of any other file.

    `--dist loadgroup` of pytest-xdist 3.8 sees no groups with pytest 9.2: each process would start each server.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _shares_server(self.config.rootpath / path) else nodeid


@functools.cache
def _shares_server(path: Path) -> bool:
    return 'scope="module"' in path.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Deal units to the processes with `--dist loadgroup`."""
    return _Units(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with shared servers and slow tests: else one process would still run them when others have nothing left."""
    items.sort(key=lambda item: (not _shares_server(item.path), item.get_closest_marker("slow") is None))
