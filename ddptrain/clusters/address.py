"""A Dask cluster that is already up: attached to by its address, used, and left as it was found."""

from __future__ import annotations


class AddressCluster:
    """The cluster behind a scheduler's address, such as tcp://10.0.0.5:8786."""

    def __init__(self, address: str) -> None:
        self.address = address if "://" in address else f"tcp://{address}"

    def begin(self) -> None:
        """Nothing to start."""

    def connect(self) -> str:
        """The address: whether anyone is there, the driver's connection will tell."""
        return self.address

    def worker_fault(self) -> str | None:
        """Workers of other people's clusters are watched through the scheduler alone."""
        return None

    def close(self) -> None:
        """Nothing was started here."""
