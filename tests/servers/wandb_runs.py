"""What the stub of the W&B backend remembers: runs, what their clients have sent, artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENTITY = "stub-entity"
Record = dict[str, Any]


@dataclass
class Stream:
    """What one client has sent of a run; in shared mode each process is one, else all of them together are one."""

    config: Record = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)  # file -> number of the line -> the line
    exits: list[int] = field(default_factory=list)

    @property
    def history(self) -> list[Record]:
        """The rows that were logged, in the order of their numbers; of those with the same _step the last, as there."""
        rows = self._records("wandb-history.jsonl")
        return list({row.get("_step", -1 - number): row for number, row in enumerate(rows)}.values())

    @property
    def system(self) -> list[Record]:
        """The samples of system metrics."""
        return self._records("wandb-events.jsonl")

    @property
    def summary(self) -> Record:
        """The summary that it has sent last."""
        return [{}, *self._records("wandb-summary.json")][-1]

    @property
    def output(self) -> str:
        """What was captured of the console."""
        return "\n".join(line for name, lines in self.lines.items() if name.endswith(".log") for line in lines.values())

    def _records(self, name: str) -> list[Record]:
        return [json.loads(line) for _, line in sorted(self.lines.get(name, {}).items())]

    def take(self, files: Mapping[str, Any]) -> None:
        """Take lines where they belong, so that one sent again is there once."""
        for name, part in files.items():
            for number, line in enumerate(part.get("content", ()), start=part.get("offset", 0)):
                self.lines.setdefault(name, {})[number] = line


@dataclass
class Artifact:
    """An artifact of a run: `state` is PENDING until it has been committed."""

    id: str
    run: str
    type: str
    name: str
    aliases: list[str]
    digest: str = ""
    metadata: Record = field(default_factory=dict)
    state: str = "PENDING"
    manifest: Record = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Run:
    """A run as the backend has it: `id` is what wandb.init was given."""

    id: str
    project: str
    group: str | None = None
    job_type: str | None = None
    name: str | None = None
    notes: str | None = None
    tags: list[str] = field(default_factory=list)
    config: Record = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    clients: dict[str, Stream] = field(default_factory=dict)

    @property
    def history(self) -> list[Record]:
        """The rows of all clients."""
        return [row for stream in self.clients.values() for row in stream.history]

    @property
    def exits(self) -> list[int]:
        """The exit codes that clients have finished it with: one, if all is well."""
        return [code for stream in self.clients.values() for code in stream.exits]

    @property
    def settings(self) -> Record:
        """Its configuration as the user gave it, without what wandb adds."""
        return plain(self.config)

    @property
    def summary(self) -> Record:
        """The summaries of all clients, together."""
        return {key: value for stream in self.clients.values() for key, value in stream.summary.items()}

    @property
    def state(self) -> str:
        """What the web page would show, if it came from exit codes alone."""
        return "running" if not self.exits else "failed" if self.exits[-1] else "finished"

    def upsert(self, given: Mapping[str, Any], client: str) -> None:
        """Take what stands in `given`; what is null there stays as it was."""
        stream = self.clients.setdefault(client, Stream())
        for attribute, key in (("group", "groupName"), ("job_type", "jobType"), ("name", "displayName")):
            setattr(self, attribute, given.get(key) or getattr(self, attribute))
        self.notes = given.get("notes") or self.notes
        self.tags = given.get("tags") or self.tags
        if given.get("config"):
            stream.config = json.loads(given["config"])
            self.config = {**(self.config if client else {}), **stream.config}

    def bucket(self) -> Record:
        """It as GraphQL has it."""
        streams = list(self.clients.values())
        tails = [stream.lines.get("wandb-history.jsonl", {}) for stream in streams]
        last = [lines[max(lines)] for lines in tails if lines][-1:]
        project = {"id": f"project-{self.project}", "name": self.project, "entity": {"id": "entity", "name": ENTITY}}
        counts = {"historyLineCount": sum(map(len, tails)), "logLineCount": 0, "eventsLineCount": 0}
        texts = {"config": self.config, "historyTail": last, "eventsTail": [], "summaryMetrics": self.summary}
        texts["wandbConfig"] = {"t": 1}  # without it wandb takes the run for one that has no rows
        names = {"id": f"bucket-{self.id}", "name": self.id, "displayName": self.name, "sweepName": None}
        told = {"description": self.notes, "notes": self.notes, "tags": self.tags, "project": project}
        return {**names, **told, **counts, **{key: json.dumps(value) for key, value in texts.items()}}


def plain(config: Mapping[str, Any]) -> Record:
    """A configuration as the user gave it, without what wandb adds."""
    return {key: entry["value"] for key, entry in config.items() if not key.startswith("_")}
