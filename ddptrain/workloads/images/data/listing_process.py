"""Lists a source of images in this process or in a child process; torch-free, so that the child starts quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, cast

from ddptrain.errors import DdptrainError, ExitCode, UsageError
from ddptrain.storage.store import Location, StoreError
from ddptrain.workloads.images.data.listing import list_images

ByClass = dict[str, list[tuple[str, int, str]]]  # key, size in bytes, version
_PROGRAM = (
    "import json, sys; sys.path[:], url, options = json.load(sys.stdin); "
    "from ddptrain.workloads.images.data.listing_process import main; main(url, options)"
)


def list_by_class(location: Location) -> ByClass:
    """Return the images of each class. Raises: UsageError, StoreError."""
    return {
        name: [(item.key, item.size_bytes, item.version) for item in items]
        for name, items in list_images(location).by_class.items()
    }


def list_in_process(location: Location) -> ByClass:
    """As `list_by_class`, in a child process: this process stays free of connections, so DataLoaders can fork it.

    Raises: UsageError, StoreError.
    """
    request = [sys.path, location.url, dict(location.options)]
    process = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM], input=json.dumps(request).encode(), stdout=subprocess.PIPE, check=False
    )
    if process.returncode:
        raise StoreError(f"{location.description} can't be listed: see the message above")
    reply = json.loads(process.stdout)
    if isinstance(reply, str):
        raise StoreError(reply)
    if isinstance(reply, list):
        raise UsageError(reply[0])
    return cast("ByClass", reply)


def main(url: str, options: Mapping[str, Any]) -> None:
    """Print the images as JSON: a mapping, or the message of a StoreError, or a list with that of a UsageError."""
    reply: object
    try:
        reply = list_by_class(Location(url, options))
    except DdptrainError as error:
        reply = [str(error)] if error.exit_code == ExitCode.USAGE else str(error)
    print(json.dumps(reply))
