"""The process that calls a mirror: reads a MirrorRequest from stdin, writes JSON lines with notes and the end."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ddptrain.config.plugin_names import MIRRORS, mirror_target
from ddptrain.errors import DdptrainError, UsageError, one_line
from ddptrain.file_ops import sha256
from ddptrain.model_registry.model_reader import open_version
from ddptrain.model_registry.records import ModelFile, VersionRecord
from ddptrain.model_registry.reference import CHAMPION, PREVIOUS
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.protocol.model_mirror import MirroredModel, MirroredVersion, MirrorRequest


def main() -> None:
    """Call the mirror that stdin requests. Ends the process."""
    started = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # mirrors may print

    def answer(**fields: str) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    request = MirrorRequest(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        call = load(request)
        timeout_s = request.timeout_s - (time.monotonic() - started)
        call(mirrored_model(request, timeout_s, lambda text: answer(note=str(text))))
        problem = ""
    except DdptrainError as error:
        problem = one_line(error)
    except (Exception, SystemExit) as error:  # a mirror may raise anything, and wandb exits: the parent tells the user
        problem = f"{type(error).__name__}: {one_line(error)}"
    answer(problem=problem)
    os._exit(0)  # threads of a client may still wait for a server


def load(request: MirrorRequest) -> Callable[[MirroredModel], object]:
    """Import the function of a mirror. Raises UsageError if there is none; what the import of the module raises."""
    if request.mirror not in MIRRORS and ":" in request.mirror:
        sys.path[:0] = request.folders
    module, _, attribute = mirror_target(request.mirror).partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{request.mirror} is not a function")
    return found  # type: ignore[no-any-return]  # the user's function: its signature is unknown


def mirrored_model(request: MirrorRequest, timeout_s: float, tell: Callable[[str], None]) -> MirroredModel:
    """Read the present state of the model. Raises RegistryDamaged, StoreError."""
    registry = ModelRegistry.open(request.registry)
    state = registry.state(request.model)
    order = {CHAMPION: 0, PREVIOUS: 1}
    numbers = [number for _, number in sorted(state.aliases.items(), key=lambda item: (order.get(item[0], 2), item[0]))]
    versions = tuple(
        _version(registry, registry.version(request.model, number), state.aliases_of(number))
        for number in dict.fromkeys(numbers)
    )
    return MirroredModel(
        name=request.model,
        versions=versions,
        reason=request.reason,
        # Another process may have set it again meanwhile.
        removed_alias="" if request.removed_alias in state.aliases else request.removed_alias,
        options=request.options,
        timeout_s=timeout_s,
        tell=tell,
    )


def _version(registry: ModelRegistry, record: VersionRecord, aliases: Iterable[str]) -> MirroredVersion:
    return MirroredVersion(
        number=record.version,
        aliases=tuple(aliases),
        sha256=digest(record.files),
        record=record.as_dict(),
        files=tuple(file.path for file in record.files),
        open=lambda: open_version(registry, record),
    )


def digest(files: Iterable[ModelFile]) -> str:
    """Return the SHA-256 of the paths and hashes of a version's files."""
    lines = sorted(f"{file.sha256} {file.path}\n" for file in files)
    return sha256("".join(lines).encode()).hexdigest()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
