"""An HTTP proxy in a process of its own that counts requests and breaks as many of them as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

_LOOPBACK = "127.0.0.1"
_CHUNK = 65536
_ENTITY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected by the test</Message></Error>"

Kind = Literal["any", "list", "get", "head", "put"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the requests of `kind`: to a share, or to the first N, or both.

    `status` answers with that code; `reset` breaks the connection without a word; `truncate` sends the head and half
    of the body, then breaks it; `stall` answers after `delay_s`. The first fault that fits
    wins.
    """

    action: Literal["status", "reset", "truncate", "stall"]
    kind: Kind = "any"
    share: float = 1.0
    first: int | None = None
    status: int = 503
    delay_s: float = 0.0


class FaultProxy:
    """A proxy that is up. `counts()` are requests by kind since the last `reset()`, and `faults`, those broken."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    @property
    def url(self) -> str:
        """Where it listens, as an endpoint."""
        return f"http://{_LOOPBACK}:{self.port}"

    def inject(self, *faults: Fault, latency_s: float = 0.0, seed: int = 0) -> None:
        """Break requests like this from now on, in place of what was told before.

        All answers are delayed by `latency_s`.
        """
        told = [dataclasses.asdict(fault) for fault in faults]
        self._ask({"faults": told, "latency_s": latency_s, "seed": seed})

    def counts(self) -> dict[str, int]:
        """The requests that have come, by kind: list, get, head, put, other; `faults`: those that were broken."""
        return self._ask({})

    def reset(self) -> None:
        """Count from zero, and break nothing any more."""
        self._ask({"faults": [], "latency_s": 0.0, "seed": 0, "reset": True})

    def _ask(self, order: dict[str, object]) -> dict[str, int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the proxy has ended"
        return dict(json.loads(answer))


@contextmanager
def fault_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    """A proxy in front of the server on that port of the loopback; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.faultproxy", str(upstream_port)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        yield FaultProxy(process, int(process.stdout.readline()))
    finally:
        assert process.stdout is not None and process.stdin is not None
        process.stdin.close()  # its end is the proxy's
        process.wait(30)
        process.stdout.close()


# --- the process ---


@dataclass(frozen=True, slots=True)
class _Request:
    head: bytes
    method: str
    target: str
    body_bytes: int

    @property
    def kind(self) -> str:
        split = urlsplit(self.target)
        if self.method != "GET":
            return {"HEAD": "head", "PUT": "put"}.get(self.method, "other")
        listing = "list-type" in parse_qs(split.query) or "/" not in split.path.strip("/")
        return "list" if listing else "get"


class _Faults:
    """Which fault comes next, as told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.latency_s = 0.0
        self._met: Counter[int] = Counter()  # fault -> requests that it concerned
        self._random = random.Random(0)

    def tell(self, order: dict[str, object]) -> dict[str, int]:
        if order.get("reset"):
            self.counts.clear()
        if isinstance(faults := order.get("faults"), list):
            self.faults = [Fault(**fault) for fault in faults]
            self.latency_s = float(str(order["latency_s"]))
            self._random = random.Random(str(order["seed"]))
            self._met.clear()
        return dict(self.counts)

    def next(self, request: _Request) -> Fault | None:
        self.counts[request.kind] += 1
        for position, fault in enumerate(self.faults):
            if fault.kind not in {"any", request.kind} or self._met[position] == fault.first:
                continue
            if self._random.random() < fault.share:
                self._met[position] += 1
                self.counts["faults"] += 1
                return fault
        return None


class _Relay:
    """One client's connection, with one of its own to the server behind it."""

    def __init__(
        self, faults: _Faults, upstream_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._faults = faults
        self._upstream_port = upstream_port
        self._reader = reader
        self._writer = writer
        self._upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> None:
        try:
            while await self._one():
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            self._writer.close()
            if self._upstream is not None:
                self._upstream[1].close()

    async def _one(self) -> bool:
        """Relay one request and its answer; false where the connection is over."""
        request = _parsed(await self._reader.readuntil(b"\r\n\r\n"))
        body = await self._reader.readexactly(request.body_bytes)
        fault = self._faults.next(request)
        await asyncio.sleep(self._faults.latency_s)
        if fault is not None and fault.action == "stall":
            await asyncio.sleep(fault.delay_s)
        if fault is not None and fault.action == "status":
            head = f"HTTP/1.1 {fault.status} injected\r\nContent-Type: application/xml\r\nContent-Length: "
            self._writer.write(head.encode() + b"%d\r\n\r\n" % len(_ENTITY))
            if request.method != "HEAD":
                self._writer.write(_ENTITY)
            await self._writer.drain()
            return True
        if fault is not None and fault.action == "reset":
            self._break()
            return False
        return await self._relay(request, body, truncate=fault is not None and fault.action == "truncate")

    async def _relay(self, request: _Request, body: bytes, *, truncate: bool) -> bool:
        if self._upstream is None:
            self._upstream = await asyncio.open_connection(_LOOPBACK, self._upstream_port, limit=2**20)
        answers, orders = self._upstream
        orders.write(request.head + body)
        head = await answers.readuntil(b"\r\n\r\n")
        fields = _fields(head)
        self._writer.write(head)
        if request.method == "HEAD" or head.split(b" ", 2)[1] in {b"204", b"304"}:
            return True
        if fields.get("transfer-encoding") == "chunked":
            return await self._chunked(answers, truncate=truncate)
        size = int(fields["content-length"])
        sent = await self._copy(answers, size // 2 if truncate else size)
        if truncate:
            self._break()
        return sent and not truncate

    async def _copy(self, answers: asyncio.StreamReader, size: int) -> bool:
        while size > 0:
            data = await answers.read(min(size, _CHUNK))
            if not data:
                return False
            self._writer.write(data)
            await self._writer.drain()
            size -= len(data)
        return True

    async def _chunked(self, answers: asyncio.StreamReader, *, truncate: bool) -> bool:
        while True:
            line = await answers.readuntil(b"\r\n")
            self._writer.write(line)
            size = int(line.split(b";")[0], 16)
            if truncate and size:
                await self._copy(answers, size // 2)
                self._break()
                return False
            await self._copy(answers, size + 2)
            if not size:
                return True

    def _break(self) -> None:
        """End the connection with a reset, after what was written for a truncated answer has gone out."""
        peer: socket.socket | None = self._writer.get_extra_info("socket")
        if peer is not None and not self._writer.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _parsed(head: bytes) -> _Request:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    return _Request(head, method, target, int(_fields(head).get("content-length", "0")))


def _fields(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def _serve(upstream_port: int) -> None:
    faults = _Faults()
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await _Relay(faults, upstream_port, reader, writer).run()
        relays.discard(task)

    server = await asyncio.start_server(relay, _LOOPBACK, 0, limit=2**20, backlog=512)
    _say(server.sockets[0].getsockname()[1])
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        _say(faults.tell(json.loads(line)))
    server.close()
    for task in [*relays]:
        task.cancel()


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: Sequence[str]) -> None:
    asyncio.run(_serve(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
