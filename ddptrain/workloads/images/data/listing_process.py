"""What a source of images holds, also found out by a process of its own; torch-free, so that it starts at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, cast

from ddptrain.errors import DdptrainError, ExitCode, UsageError
from ddptrain.storage.base import Location, StoreError
from ddptrain.workloads.images.data.listing import list_images

ByClass = dict[str, list[tuple[str, int, str]]]  # key, size in bytes, version
_PROGRAM = (
    "import json, sys; sys.path[:], url, options = json.load(sys.stdin); "
    "from ddptrain.workloads.images.data.listing_process import list_for_others; list_for_others(url, options)"
)


def listed_here(location: Location) -> ByClass:
    """The images of each class. Raises: UsageError, StoreError."""
    return {
        name: [(item.key, item.size_bytes, item.version) for item in items]
        for name, items in list_images(location).by_class.items()
    }


def listed_elsewhere(location: Location) -> ByClass:
    """The same from a process of its own, for this one's DataLoaders fork.

    Raises: UsageError, StoreError.
    """
    orders = [sys.path, location.url, dict(location.options)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM], input=json.dumps(orders).encode(), stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise StoreError(f"{location.words} can't be listed: see above")
    told = json.loads(done.stdout)
    if isinstance(told, str):
        raise StoreError(told)
    if isinstance(told, list):
        raise UsageError(told[0])
    return cast("ByClass", told)


def list_for_others(url: str, options: Mapping[str, Any]) -> None:
    """Prints, as JSON, what is there; a text where it can't be listed, one in a list where there is nothing to use."""
    told: object
    try:
        told = listed_here(Location(url, options))
    except DdptrainError as error:
        told = [str(error)] if error.exit_code == ExitCode.USAGE else str(error)
    print(json.dumps(told))
