"""Free slots on other hosts, to which slow ranks can move, and the slots that the next reservation avoids for that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distributed import Client

from ddptrain.clusters.scheduler import slots
from ddptrain.driver.worker_group import dask_call
from ddptrain.log import Log

_ANSWER_S = 3.0
_log = Log(__name__)


class SpareSlots:
    """The spare slots of a run, and the slots that it avoids."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._avoided: set[tuple[str, int]] = set()  # addresses of workers, and the numbers of their slots

    @property
    def avoided(self) -> list[tuple[str, int]]:
        """The slots that a reservation must not contain: worker and number."""
        return sorted(self._avoided)

    def find(self, slow: Iterable[slots.Slot]) -> bool:
        """Return whether other hosts have free slots in place of these. If so, the next reservation avoids these."""
        slow_slots = [(slot.worker, slot.index) for slot in slow]
        try:
            asked = self._client.run_on_scheduler(slots.find_spare, self._run_id, slow_slots, asynchronous=True)
            answer: dict[str, Any] = dask_call.wait_for_answer(self._client, asked, lambda: _ANSWER_S, lambda: 0)
        except Exception as error:  # any type, while a connection breaks; the run continues without them
            _log.info("spare slots not found", error=str(error))
            return False
        _log.info("spare slots looked for", slow=slow_slots, **answer)
        if answer["found"]:
            self._avoided |= {(str(worker), int(index)) for worker, index in answer["avoid"]}
        return bool(answer["found"])

    def give_up(self) -> bool:
        """Stop avoiding slots, because other runs have taken the spare slots. Return whether any were avoided."""
        had, self._avoided = bool(self._avoided), set()
        return had
