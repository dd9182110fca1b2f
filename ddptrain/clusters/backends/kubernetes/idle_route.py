"""A route of the scheduler's HTTP server: the time since which the cluster is idle.

The operator of dask-kubernetes reads it, and deletes a cluster that is idle for too long. Dask's own route is not used:
it comes with routes that let anyone end workers, and it counts a cluster as idle while a run waits for slots.
"""

from __future__ import annotations

import json
import time

from distributed.http.utils import RequestHandler

from ddptrain.clusters.scheduler.scheduler_process import is_used


class _Idle(RequestHandler):
    """Answers {"idle_since": Unix seconds}, 0 for a cluster in use."""

    last_use = 0.0  # Unix seconds at which a request last found the cluster in use

    def get(self) -> None:
        """Answer the operator, which asks every few seconds."""
        idle_since = self.server.check_idle() or 0.0
        if is_used(self.server):
            type(self).last_use, idle_since = time.time(), 0.0
        elif idle_since:
            idle_since = max(idle_since, self.last_use)
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps({"idle_since": idle_since}))


routes: list[tuple[str, type[RequestHandler], dict[str, str]]] = [("/api/v1/check_idle", _Idle, {})]
