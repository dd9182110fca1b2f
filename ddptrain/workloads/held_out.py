"""held_out.json: which data an evaluation uses, in the inputs of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddptrain.file_ops import sha256, write_atomic

FILE = "held_out.json"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Data to evaluate on: their digest (SHA-256), their number, and what they are, such as names."""

    digest: str
    n: int
    noun: str

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        write_atomic(folder / FILE, (json.dumps(asdict(self)) + "\n").encode())


def digest_of(data: Mapping[str, object]) -> str:
    """Return the SHA-256 of JSON data; the order of keys does not matter."""
    return sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()
