"""Writes docs/reference/output.schema.json: the JSON that `results list|show|logs --json` and `--output json` print.

Fields that exist today stay; new ones may be added.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ddptrain.protocol.events import KINDS, Event
from ddptrain.results.run_record import BestRecord, FailureRecord, NotFiniteRecord, RankRecord, RunRecord
from ddptrain.results.sweep_record import SweepRecord

TARGET = Path(__file__).parents[2] / "docs/reference/output.schema.json"
_TEXT, _INT, _NUMBER, _YES = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
_NUMBERS = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_TEXTS = {"type": "array", "items": _TEXT}
_WHERE = {"run_id": _TEXT, "run_dir": _TEXT}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_STEP, _EPOCH = _or_null(_INT), _or_null(_NUMBER)
# What the driver says: the events that are not sent by a rank as they are.
_DRIVER: dict[str, dict[str, Any]] = {
    "run_started": {**_WHERE, "world_size": _INT, "attempt": _INT, "resumed_from": _STEP},
    "attempt_ended": {"attempt": _INT, "status": _TEXT},
    "run_finished": {
        **_WHERE,
        "status": {"enum": ["succeeded", "failed", "preempted", "cancelled", "queued"]},
        "exit_code": _INT,
        "duration_s": _NUMBER,
        "time_use_s": _NUMBERS,
        "goodput": _or_null(_NUMBER),
        "last_metrics": _NUMBERS,
        "best": _or_null({"$ref": "#/$defs/BestRecord"}),
        "result": {},
        "failure": _or_null({"$ref": "#/$defs/FailureRecord"}),
    },
    "run_submitted": {**_WHERE, "job": _TEXT},
    "status": {"message": _TEXT},
    "notice": {"level": {"enum": ["info", "warning", "error"]}, "message": _TEXT},
    "message": {"level": {"enum": ["info", "warning", "error"]}, "message": _TEXT},
    "hang_suspected": {"message": _TEXT},
    "rank_started": {"rank": _INT, "host": _TEXT, "pid": _INT, "device": _TEXT},
    "rank_ended": {
        "ok": _YES,
        "stopped": _YES,
        **dict.fromkeys(("rank", "local_rank", "node_rank"), _INT),
        "exit": _STEP,
    },
    "log": {"rank": _INT, "line": _TEXT},
    "metrics": {"rank": _INT, "step": _STEP, "epoch": _EPOCH, "values": _NUMBERS},
    "progress": {"rank": _INT, "done": _or_null(_NUMBER), "total": _or_null(_NUMBER), "unit": _TEXT},
    "checkpoint_staged": {"rank": _INT, "step": _INT, "epoch": _EPOCH},
    "checkpoint_saved": {"rank": _INT, "step": _INT, "path": _TEXT, "best": _or_null({"$ref": "#/$defs/BestRecord"})},
    "artifact_saved": {"rank": _INT, "path": _TEXT},
    "fault": {"rank": _INT, "kind": _TEXT, "message": _TEXT, "victim": _YES},
    "returned": {"rank": _INT, "result": {}},
    "tracked": {"rank": _INT, "tracker": _TEXT, "found": {"type": "object", "additionalProperties": _TEXT}},
    "tracker_failed": {"rank": _INT, "tracker": _TEXT, "message": _TEXT},
    "epochs": {"total": _INT, "epoch": _INT},
    "not_finite": {"$ref": "#/$defs/NotFiniteRecord"},
    "error": {"exit_code": _INT, "message": _TEXT, "problems": {"type": "array"}},
}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _of_rank(kind: type[Event]) -> dict[str, Any]:
    """The fields of an event that a rank has sent, as it is recorded."""
    schema = TypeAdapter(kind).json_schema(mode="serialization")["properties"]
    fields = {each.name: schema[each.name] for each in dataclasses.fields(kind) if each.name != "time_ns"}
    return {"rank": _INT, "rank_time_ns": _INT, **{name: dict(field, title=name) for name, field in fields.items()}}


def output_schema() -> dict[str, Any]:
    """Return the schema."""
    definitions: dict[str, Any] = {}
    for kind in (RunRecord, SweepRecord, BestRecord, FailureRecord, NotFiniteRecord, RankRecord):
        schema: dict[str, Any] = TypeAdapter[Any](kind).json_schema(
            mode="serialization", ref_template="#/$defs/{model}"
        )
        definitions |= schema.pop("$defs", {})
        definitions[kind.__name__] = schema
    listed = _object({"run_dir": _TEXT, "tags": _TEXTS, "note": _TEXT, "problem": _or_null(_TEXT)})
    artifacts = {"type": "array", "items": _object({"path": _TEXT, "size_bytes": _INT})}
    logs = {"type": "object", "additionalProperties": _TEXT}
    events = {**_DRIVER, **{kind: _of_rank(cls) for kind, cls in sorted(KINDS.items()) if cls.recorded}}
    known: list[dict[str, Any]] = [
        {"if": {"properties": {"event": {"const": kind}}}, "then": fields if "$ref" in fields else _object(fields)}
        for kind, fields in events.items()
    ]
    definitions |= {
        "listed_run": {"allOf": [{"$ref": "#/$defs/RunRecord"}, listed]},
        "shown_run": {"allOf": [{"$ref": "#/$defs/listed_run"}, _object({"artifacts": artifacts, "logs": logs})]},
        "shown_sweep": {"allOf": [{"$ref": "#/$defs/SweepRecord"}, _object({"sweep_dir": _TEXT})]},
        "event": _object({"event": _TEXT}) | {"allOf": known},
    }
    outputs: dict[str, dict[str, Any]] = {
        "results list --json": {"type": "array", "items": {"$ref": "#/$defs/listed_run"}},
        "results show --json": {"anyOf": [{"$ref": "#/$defs/shown_run"}, {"$ref": "#/$defs/shown_sweep"}]},
        "--output json, results logs --json: each line": {"$ref": "#/$defs/event"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Output of ddptrain",
        "description": "Fields that are required here stay. Unknown fields and events may be added: ignore them.",
        "anyOf": [{"title": title, **schema} for title, schema in outputs.items()],
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """Return the text of the file."""
    return json.dumps(output_schema(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(schema_text(), encoding="utf-8")
    sys.exit(0)
