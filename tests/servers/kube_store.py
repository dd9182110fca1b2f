"""What `kube_server` keeps: objects with versions, owners, finalizers and watchers, as etcd and the API server do."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(slots=True)
class Refusal(Exception):  # it is an answer
    """A Status, as the API server answers it."""

    code: int
    reason: str
    message: str

    def status(self) -> Object:
        """The answer's body."""
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.code}
        return {**status, "reason": self.reason, "message": self.message}


@dataclass(slots=True)
class Store:
    """All objects, and who watches them. What changes them never awaits: no other change comes in between."""

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)  # (plural, namespace, name)
    history: list[tuple[int, str, str, Object]] = field(default_factory=list)  # (version, plural, event, object)
    version: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set by the next change, and replaced by it
    listener: Callable[[str, str, Object], None] | None = None

    def put(self, plural: str, thing: Object, event: str) -> Object:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        meta = thing["metadata"]
        key = (plural, meta.get("namespace", ""), meta["name"])
        if event == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = thing
        copy = json.loads(json.dumps(thing))
        self.history.append((self.version, plural, event, copy))
        self.news.set()
        self.news = asyncio.Event()
        if self.listener is not None:
            self.listener(plural, event, copy)
        return thing

    def find(self, plural: str, namespace: str, query: Mapping[str, str]) -> list[Object]:
        chosen = [
            thing
            for (kind, place, _), thing in sorted(self.objects.items())
            if kind == plural and (not namespace or place == namespace)
        ]
        return [thing for thing in chosen if selected(thing, query)]

    def has(self, plural: str, thing: Object) -> bool:
        """Whether this object is there still, and no later one of its name."""
        meta = thing["metadata"]
        known = self.objects.get((plural, meta.get("namespace", ""), meta["name"]))
        return known is not None and known["metadata"]["uid"] == meta["uid"]

    def named(self, plural: str, namespace: str, name: str) -> Object:
        thing = self.objects.get((plural, namespace, name))
        if thing is None:
            raise Refusal(404, "NotFound", f'{plural} "{name}" not found')
        return thing

    def create(self, plural: str, namespace: str, thing: Object) -> Object:
        name = thing["metadata"].get("name") or thing["metadata"]["generateName"] + uuid.uuid4().hex[:5]
        if (plural, namespace, name) in self.objects:
            raise Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists')
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        thing["metadata"] |= {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now}
        if plural == "services":
            thing["status"] = {"loadBalancer": {}}
        self.put(plural, thing, "ADDED")
        if self._is_orphan(thing):  # made too late by who had seen its owner: the garbage collector's
            self.delete(plural, thing)
        return thing

    def patch(self, plural: str, namespace: str, name: str, change: Any) -> Object:
        thing = self.named(plural, namespace, name)
        changed: Object = merged(thing, change)
        changed["metadata"]["name"] = name
        if changed["metadata"].get("deletionTimestamp") and not changed["metadata"].get("finalizers"):
            return self.remove(plural, changed)
        if changed == thing:
            return thing
        self.put(plural, changed, "MODIFIED")
        if self._is_orphan(changed):
            self.delete(plural, changed)
        return changed

    def delete(self, plural: str, thing: Object) -> Object:
        """Pods go when their node says so, others at once unless a finalizer holds them."""
        if plural == "pods" or thing["metadata"].get("finalizers"):
            if not thing["metadata"].get("deletionTimestamp"):
                self.put(plural, merged(thing, {"metadata": {"deletionTimestamp": "now"}}), "MODIFIED")
            return thing
        return self.remove(plural, thing)

    def remove(self, plural: str, thing: Object) -> Object:
        self.put(plural, thing, "DELETED")
        for key, each in list(self.objects.items()):
            if key in self.objects and self._is_orphan(each):
                self.delete(key[0], each)
        return thing

    def _is_orphan(self, thing: Object) -> bool:
        """Whether none of its owners is there any more."""
        owners = {reference["uid"] for reference in thing["metadata"].get("ownerReferences", ())}
        return bool(owners) and not any(each["metadata"]["uid"] in owners for each in self.objects.values())

    async def watch(self, plural: str, namespace: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        place: int = next(
            (at for at, entry in enumerate(self.history) if entry[0] > int(query.get("resourceVersion") or 0)),
            len(self.history),
        )
        while True:
            while len(self.history) <= place:
                await self.news.wait()
            _, kind, event, thing = self.history[place]
            place += 1
            here = not namespace or thing["metadata"].get("namespace") == namespace
            if kind == plural and here and selected(thing, query):
                yield {"type": event, "object": thing}


def selected(thing: Object, query: Mapping[str, str]) -> bool:
    """Whether labels and fields are as a query wants them; "=" and "!=" are understood."""
    labels = thing["metadata"].get("labels") or {}
    for part in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = part.replace("==", "=").partition("=")
        if (labels.get(key) != value) if value else key not in labels:
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = part.partition("=")
        found: Any = thing
        for step in key.split("."):
            found = (found or {}).get(step)
        if found != value:
            return False
    return True


def merged(old: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict):
        return change
    base = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            base.pop(key, None)
        else:
            base[key] = merged(base.get(key), value)
    return base


def check_schema(thing: Object) -> None:
    """Compare an object with the schema that Kubernetes publishes. Raises Refusal."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(thing, "1.33", strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refusal(422, "Invalid", f"{thing['kind']} is invalid: {error.message}") from error
