"""Runs one case: run until the fault, check what is left, resume, and check the result."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import processes
from tests.chaos.arena import INSTALLED, SABOTEUR, Arena, ClusterUp, Command, Ended
from tests.chaos.expect import NO_FAILURE, Expected, expected, least_step, status_of
from tests.chaos.table import STEPS, Case, Kind

RUN = "run"
HANGS = ("hang", "stop", "other_stop", "thread")
LEFT_S = 30.0
_KEPT = 3  # checkpoint.keep's default
_HANG_S = 1.5
_QUIET_HANG_S = 3.0
_QUIET_S = 5 * _QUIET_HANG_S  # of a validation without output
_START_S = 8.0  # for cases that hang before the training


@dataclass
class Findings:
    """The result of a case; without problems everything was as expected."""

    case: Case
    problems: list[str] = field(default_factory=list)
    cause_right: bool | None = None  # None: no root cause was expected
    fault_to_end_s: float | None = None
    resumed_from: int | None = None
    left: int = 0
    lost: int = 0  # verified checkpoints
    took_s: float = 0.0
    output: str = ""

    def check(self, true: bool, problem: str) -> bool:
        """Record a problem if a condition is false."""
        if not true:
            self.problems.append(problem)
        return true


@dataclass(frozen=True, slots=True)
class Reference:
    """The run without a fault: its last weights, and how much of a checkpoint rank 0 writes."""

    weights: bytes
    checkpoint_bytes: int


def undisturbed(arena: Arena, sharded: bool) -> Reference:
    """Run the stub without a fault. Raises RuntimeError if that fails."""
    folder = arena.new_folder("undisturbed")
    _write_config(folder, None, sharded)
    ended = arena.start(folder, "undisturbed", INSTALLED, *_train(arena.warm().name)).wait()
    if ended.code != 0:
        raise RuntimeError(f"the undisturbed run ended with {ended.code}:\n{ended.stdout}{ended.stderr}")
    last = folder / "runs" / RUN / "checkpoints" / f"step-{STEPS}"
    written = [path for path in last.iterdir() if path.name != "checkpoint.json" and ".rank-1." not in path.name]
    return Reference(_weights(folder), sum(path.stat().st_size for path in written))


def run_case(arena: Arena, case: Case, reference: Reference) -> Findings:
    """Run the case. Its folder is kept if there are problems."""
    began = time.monotonic()
    run = _CaseRun(arena, case, reference)
    try:
        run.do()
    except Exception as error:
        run.findings.problems.append(f"the suite itself failed: {error!r}")
    finally:
        run.clear()
    run.findings.took_s = time.monotonic() - began
    return run.findings


def _train(cluster: str | None, *more: str) -> list[str]:
    return ["train", "run.yaml", *(("--cluster", cluster) if cluster else ()), *(more or ("--run-id", RUN))]


def _write_config(folder: Path, case: Case | None, sharded: bool) -> None:
    failure: dict[str, Any] = {"grace_s": 3.0, "hang_timeout_s": 20.0}
    cluster: dict[str, Any] = {"ranks": 2, "gpus": 0, "wait_s": 30.0}
    if case is not None:
        if case.kind.fault in HANGS:
            failure["hang_timeout_s"] = _HANG_S
            cluster["start_timeout_s"] = _START_S
        if case.kind.fault == "validate":
            failure["hang_timeout_s"] = _QUIET_HANG_S
        if case.kind.restart:
            failure["max_restarts"] = 1
    every = {"every_epochs": 1} if case is None or case.interval == 3 else {"every_epochs": None, "every_steps": 2}
    checkpoint = {"metric": None, "asynchronous": case is None or case.asynchronous, **every}
    workload = {"workload": "stub:steps", "params": {"sharded": sharded}}
    content = {**workload, "cluster": cluster, "failure": failure, "checkpoint": checkpoint}
    (folder / "run.yaml").write_text(json.dumps(content))


def _weights(folder: Path) -> bytes:
    """The weights of the last step; those of a sharded model one rank after the other."""
    last = folder / "runs" / RUN / "checkpoints" / f"step-{STEPS}"
    return b"".join(path.read_bytes() for path in sorted(last.glob("model*.safetensors")))


class _CaseRun:
    def __init__(self, arena: Arena, case: Case, reference: Reference) -> None:
        self.arena, self.case, self.reference = arena, case, reference
        self.kind: Kind = case.kind
        self.expected: Expected = expected(case)
        self.findings = Findings(case)
        self.folder = arena.new_folder(f"case-{case.number}")
        self.mark = str(self.folder)
        self.run_dir = self.folder / "runs" / RUN
        self.cluster: ClusterUp | None = None

    def do(self) -> None:
        """Cause the fault, check the result, and resume."""
        if self.kind.cluster != "embedded":
            self.cluster = self.arena.up() if self.kind.cluster == "own" else self.arena.warm()
        self._plan()
        ended = self._into_the_fault()
        self.findings.output = f"--- stdout\n{ended.stdout[-3000:]}\n--- stderr\n{ended.stderr[-4000:]}"
        self._look_at_end(ended)
        self._look_at_left()
        record = self._record()
        if record is not None:
            self._look_at_record(record, ended)
            self._look_at_cause(record, ended)
        self._look_at_checkpoints(record)
        if ended.code != 0:
            self._resume(record)
        self._look_at_steps()
        if self.findings.check((self.run_dir / "checkpoints").is_dir(), "there are no checkpoints"):
            same = _weights(self.folder) == self.reference.weights
            self.findings.check(same, "the final weights are not those of the undisturbed run")

    def clear(self) -> None:
        """Check that nothing of the case is left on the machine; its folder is kept if there are problems."""
        processes.kill(processes.marked(self.mark))
        if self.cluster is not None and self.kind.cluster == "own":
            self.arena.down(self.cluster)
        if not self.findings.problems:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- the fault ---

    def _plan(self) -> None:
        _write_config(self.folder, self.case, self.case.sharded)
        if self.kind.moment not in ("start", "home"):
            plan = {
                "fault": self.kind.fault,
                "moment": self.kind.moment,
                "ranks": self.case.ranks,
                "step": self.case.step,
                "byte": int(self.case.share * self.case.saves * self.reference.checkpoint_bytes),
                "settle_s": self.case.settle_s,
                "home": least_step(self.case),
                "quiet_s": _QUIET_S,
            }
            (self.folder / "fault.json").write_text(json.dumps(plan))
        if self.cluster is not None:
            (self.folder / "scheduler.pid").write_text(str(self.cluster.scheduler))

    def _into_the_fault(self) -> Ended:
        program: list[str | Path] = [INSTALLED]
        if self.kind.moment == "home":
            program = [sys.executable, SABOTEUR, str(self.case.operation)]
        arguments = _train(self.cluster.name if self.cluster else None)
        command = self.arena.start(self.folder, self.mark, *program, *arguments)
        (self.folder / "driver.pid").write_text(str(command.popen.pid))
        if self.kind.moment == "start":
            self._strike_at_start(command)
        return command.wait()

    def _strike_at_start(self, command: Command) -> None:
        """Faults from outside: of the driver after a random time, of a rank as soon as it exists."""
        if self.kind.fault.startswith("driver_"):
            name = {"kill": "SIGKILL", "term": "SIGTERM", "int": "SIGINT"}[self.kind.fault[len("driver_") :]]
            # On a cluster that is up the ranks train after 0.3 s, and a run of the stub has ended after 0.6 s.
            earliest_s, latest_s = (0.15, 0.35) if self.cluster else (0.3, 3.0)
            time.sleep(random.Random(self.case.reproduction).uniform(earliest_s, latest_s))
            self._fire(command.popen.pid, signal.Signals[name])
            return
        name = f"ddptrain-rank{self.kind.victim}"
        while command.popen.poll() is None:
            parent = self.cluster.worker if self.cluster else command.popen.pid
            pid = processes.named(name, processes.descendants(parent))
            if pid is not None:
                self._fire(pid, signal.SIGKILL)
                return
            time.sleep(0.002)

    def _fire(self, pid: int, number: signal.Signals) -> None:
        (self.folder / "fired-outside").write_text(str(time.time_ns()))
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    # --- checks ---

    def _look_at_end(self, ended: Ended) -> None:
        check, fired = self.findings.check, [int(path.read_text()) for path in self.folder.glob("fired-*")]
        if self.kind.moment == "home" and not fired:  # there were fewer operations: the run has succeeded
            check(ended.code == 0, f"exit code {ended.code}, not 0")
            return
        check(bool(fired), "the fault has not happened")
        codes = " or ".join(map(str, self.expected.codes))
        check(ended.code is not None, "the command did not end in time")
        check(ended.code is None or ended.code in self.expected.codes, f"exit code {ended.code}, not {codes}")
        check("Traceback" not in _without_ranks(ended.stderr), "a traceback of ours on stderr")
        if fired and not self.kind.restart and self.kind.fault not in (*NO_FAILURE, "driver_stop"):
            self.findings.fault_to_end_s = (ended.at_ns - min(fired)) / 1e9

    def _look_at_left(self) -> None:
        """Check processes, and the files that workers keep for a run."""

        def ours() -> set[int]:
            below = processes.ranks_below(self.cluster.worker) if self.cluster else set()
            return processes.marked(self.mark) | below

        left = processes.until_none(ours, LEFT_S)
        self.findings.left = len(left)
        words = ", ".join(map(processes.describe, left))
        self.findings.check(not left, f"processes are left after {LEFT_S:g} s: {words}")
        scratch = [self.run_dir / ".scratch", *([self.cluster.scratch / RUN] if self.cluster else [])]
        if self.kind.fault in ("worker", "scheduler") and self.kind.cluster == "own":
            scratch = scratch[:1]  # the process that would clean up is gone; the folder is deleted with the cluster
        deadline = time.monotonic() + LEFT_S
        while any(path.exists() for path in scratch) and time.monotonic() < deadline:
            time.sleep(0.1)
        there = [str(path) for path in scratch if path.exists()]
        self.findings.check(not there, f"left in the scratch folder: {', '.join(there)}")
        processes.kill(left)

    def _record(self) -> dict[str, Any] | None:
        path = self.run_dir / "run.json"
        if not path.exists():
            early = self.kind.fault.startswith("driver_") and self.kind.moment == "start"
            self.findings.check(early, "there is no run.json")
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def _look_at_record(self, record: dict[str, Any], ended: Ended) -> None:
        check = self.findings.check
        if ended.code is not None and ended.code < 0:
            check(record["status"] in ("running", "succeeded"), f"run.json of a killed driver says {record['status']}")
            return
        if ended.code is None:
            return
        said = (record["status"], record["exit_code"])
        right = (status_of(ended.code), ended.code)
        check(said == right, f"run.json says {said}, the command {right}")
        check(record["ended_at"] is not None, "run.json has no ended_at")
        attempts = record["attempts"]
        if self.kind.moment != "start":
            check(len(attempts) == self.expected.attempts, f"{len(attempts)} attempts, not {self.expected.attempts}")
        check(all(attempt["outcome"] and attempt["ended_at"] for attempt in attempts), "an attempt has no end")

    def _look_at_cause(self, record: dict[str, Any], ended: Ended) -> None:
        """Check the root cause: in run.json, or in the output before a restart."""
        wanted = self.expected
        if not wanted.fails or ended.code is None:
            return
        failure = record["failure"] or {}
        if self.kind.restart:
            named = re.findall(r"rank (\d+) on \S+ (?:failed first|hung): (.*)", ended.stderr)
            right = any(
                (not wanted.ranks or int(rank) in wanted.ranks) and wanted.words in line for rank, line in named
            )
            found = str(named)
        else:
            at_fault = not wanted.ranks or failure.get("rank") in wanted.ranks
            right = at_fault and failure.get("kind") == wanted.kind and wanted.words in failure.get("message", "")
            found = str({key: failure.get(key) for key in ("rank", "kind", "type", "message")})
        self.findings.cause_right = right
        self.findings.check(right, f"root cause: {found}, not {wanted.kind} of {wanted.ranks} with {wanted.words!r}")

    def _look_at_checkpoints(self, record: dict[str, Any] | None) -> None:
        """Check that the checkpoints of run.json exist, or were replaced by enough newer ones."""
        whole = set()
        problems: dict[int, str] = {}
        for path in (self.run_dir / "checkpoints").glob("step-*"):
            step = int(path.name[len("step-") :])
            if problem := _damage(path):
                problems[step] = problem
            else:
                whole.add(step)
        for step in (int(name[len("step-") :]) for name in (record or {}).get("checkpoints", [])):
            newer = [other for other in whole if other > step]
            if step not in whole and len(newer) < _KEPT:
                self.findings.lost += 1
                self.findings.problems.append(
                    f"the checkpoint of step {step} is lost: {problems.get(step, 'not there')}"
                )

    # --- resume ---

    def _resume(self, record: dict[str, Any] | None) -> None:
        for name in ("fault.json", *(path.name for path in self.folder.glob("fired-*"))):
            (self.folder / name).unlink(missing_ok=True)
        if record is not None and record["status"] == "succeeded":
            return
        cluster = self.cluster.name if self.cluster and self.kind.cluster == "warm" else None
        if cluster is not None:
            cluster = self.arena.warm().name
        how = () if record is None else ("--resume", RUN)
        command: list[str | Path] = [INSTALLED, *_train(cluster, *how)]
        started = [
            self.arena.start(self.folder, self.mark, *command, output=f"resume-{number}")
            for number in range(self.kind.resumes)
        ]
        all_ended = [each.wait() for each in started]
        # One command gets the run. Another one is refused, or starts after the run has succeeded.
        right = [ended.code for ended in all_ended].count(0) == 1
        right = right and all(ended.code in (0, 6) or "has succeeded" in ended.stderr for ended in all_ended)
        if not self.findings.check(right, f"resumed, it ended with {[ended.code for ended in all_ended]}"):
            for ended in all_ended:
                self.findings.output += f"\n--- resumed: stderr\n{ended.stderr[-4000:]}"

    def _look_at_steps(self) -> None:
        """The step from which the last attempt resumed."""
        started = [line for line in _json_lines(self.run_dir / "events.jsonl") if line.get("event") == "run_started"]
        if len(started) < 2:
            return
        self.findings.resumed_from = started[-1]["resumed_from"]
        reached, least = self.findings.resumed_from or 0, least_step(self.case)
        self.findings.check(reached >= least, f"went on from step {reached}, where step {least} had been saved")


def _damage(checkpoint: Path) -> str:
    """What differs between a checkpoint and its manifest; empty if nothing does."""
    try:
        for file in json.loads((checkpoint / "checkpoint.json").read_text())["files"]:
            data = (checkpoint / file["name"]).read_bytes()
            if (len(data), hashlib.sha256(data).hexdigest()) != (file["size_bytes"], file["sha256"]):
                return f"{file['name']} differs from the manifest"
    except (OSError, ValueError, KeyError) as error:
        return repr(error)
    return ""


def _json_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            yield json.loads(line)


def _without_ranks(stderr: str) -> str:
    """The driver's own output, without the output of ranks."""
    return "\n".join(line for line in stderr.splitlines() if not line.startswith("[rank "))
