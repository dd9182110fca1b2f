"""A Dask cluster that is already up: attached to by its address, used, and left as it was found."""

from __future__ import annotations

from urllib.parse import urlsplit

from ddptrain.errors import ClusterError


class AddressCluster:
    """The cluster behind a scheduler's address, such as tcp://10.0.0.5:8786."""

    def __init__(self, address: str) -> None:
        self.address = address if "://" in address else f"tcp://{address}"

    def begin(self) -> None:
        """Nothing to start."""

    def connect(self) -> str:
        """The address, checked for its form. Raises ClusterError."""
        parts = urlsplit(self.address)
        if parts.scheme not in {"tcp", "tls", "ws", "wss", "ucx"} or not parts.hostname:
            raise ClusterError(f"{self.address!r} is no scheduler's address: expected something like tcp://host:8786")
        return self.address

    def worker_fault(self) -> str | None:
        """Workers of other people's clusters are watched through the scheduler alone."""
        return None

    def close(self) -> None:
        """Nothing was started here."""
