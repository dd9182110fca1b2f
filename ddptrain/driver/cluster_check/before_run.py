"""The check before a run (`cluster.check`) of the hosts on which slots were reserved for the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddptrain.clusters.scheduler import slots
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import counted
from ddptrain.driver.cluster_check.check import HostCheck, Report
from ddptrain.driver.cluster_check.findings import Level
from ddptrain.driver.cluster_check.probe_plan import DEPTHS
from ddptrain.driver.cluster_check.report import as_dict, finding_line, host_names
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError


class CheckedSlots:
    """Reserves slots for attempts of a run, on hosts that have passed the check.

    A host is checked once. Further attempts check the hosts again only if a new one is among them.
    """

    def __init__(
        self, config: RunConfig, worker_group: WorkerGroup, recorder: Recorder, check: Callable[[], None]
    ) -> None:
        """`check` is called while ranks measure, and may raise."""
        self._settings = config.cluster
        self._worker_group, self._recorder = worker_group, recorder
        self._checked: set[str] = set()
        self._bad: dict[str, str] = {}  # host -> its name
        depth = DEPTHS.get(config.cluster.check)
        on_gpus = config.cluster.gpus != 0
        self._check = HostCheck(worker_group, depth, config.env, check, on_gpus) if depth is not None else None

    def reserve(self, reserve: Callable[[bool], list[RankPlace]]) -> list[RankPlace]:
        """Call `reserve` until all hosts of its places have passed the check.

        Its argument: whether to wait for more slots than the minimum; False after hosts were left out. Raises
        ClusterError if a host has not passed and must not be left out, or if too few hosts are left.
        """
        gather = True
        while True:
            self._avoid()
            try:
                places = reserve(gather)
            except ClusterError as error:
                if not self._bad:
                    raise
                raise ClusterError(f"{error}. Left out after the check: {', '.join(self._bad.values())}") from error
            hosts = {place.slot.host for place in places}
            if self._check is None or hosts <= self._checked:
                return places
            report = self._report(places, self._check)
            self._checked |= hosts
            if not report.left_out:
                return places
            gather = False

    def _report(self, places: Sequence[RankPlace], check: HostCheck) -> Report:
        """Check, report the findings, and note the hosts to leave out. Raises ClusterError."""
        count = counted(len({place.slot.host for place in places}), "host")
        self._recorder.status(f"checking {count} ({check.depth.name})")
        report = check.run(places)
        if report.bad and self._settings.exclude_bad:
            report = check.without_bad(report, places)
        self._recorder.event("cluster_check", **as_dict(report))
        names = host_names(report)
        lines = [(each.level, finding_line(each, names)) for each in report.findings]
        for level, text in lines:
            self._recorder.warn(f"cluster check, {level}: {text}")
        if not report.usable:
            what = "; ".join(text for level, text in lines if level is Level.BAD) or report.everyone_else_error
            advice = "" if self._settings.exclude_bad else ". cluster.exclude_bad: true trains without bad hosts"
            raise ClusterError(f"the cluster check ({check.depth.name}) found: {what}{advice}")
        self._bad |= {host: names.get(host, host) for host in report.left_out}
        if report.left_out:
            self._recorder.warn(f"this run does not use {', '.join(names.get(host, host) for host in report.left_out)}")
        else:
            self._recorder.notice(f"cluster check ({check.depth.name}): {count} ok, {report.seconds:.1f} s")
        return report

    def _avoid(self) -> None:
        """Reserve no slots of bad hosts, also of workers that have joined since."""
        if self._bad:
            overview = self._worker_group.client.run_on_scheduler(slots.overview)
            for worker in overview["workers"]:
                if worker["host"] in self._bad:
                    self._worker_group.avoid(worker["address"])
