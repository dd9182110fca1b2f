"""`python -m ddptrain.clusters.backends.kubernetes.port_forward`: local ports that lead to a scheduler's pod.

    python -m ddptrain.clusters.backends.kubernetes.port_forward --service dev-scheduler --namespace ml --file F 0:8786

It runs as long as the service exists. Each connection has its own session with the API server. The port-forward of kr8s
has one session for all connections: when a token expires, all of them end, in the middle of a training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.clusters.backends.kubernetes.api_client import CORE, Kubernetes, connected
from ddptrain.clusters.backends.kubernetes.pods import is_ready
from ddptrain.clusters.security import write_private_json
from ddptrain.errors import ClusterError

if TYPE_CHECKING:
    from httpx_ws import AsyncWebSocketSession

_CHUNK = 32 * 1024  # the API server's own limit for a frame is larger
_LOOK_S = 60.0  # seconds; each check may run the credential plugin of the kubeconfig
_DATA, _ERROR = 0, 1  # channels of a port, as the first byte of a frame


def main(argv: list[str] | None = None) -> None:
    """Forward until the service has been deleted, or until a signal."""
    options = _parser().parse_args(argv)
    asyncio.run(_serve(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.clusters.backends.kubernetes.port_forward",
        description="Forward ports to the pod of a service.",
    )
    parser.add_argument("--service", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--context", default="")
    parser.add_argument("--file", type=Path, required=True, help="gets the local ports, as a JSON list")
    parser.add_argument("ports", nargs="+", help="LOCAL:REMOTE; LOCAL 0 is any free one")
    return parser


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    forward = _Forward(options.service, options.namespace, options.context, stop)
    async with contextlib.AsyncExitStack() as servers:
        ports = []
        for pair in options.ports:
            local, _, remote = pair.partition(":")
            ports.append(await servers.enter_async_context(forward.listening(int(local), int(remote))))
        write_private_json(options.file, ports)
        while not stop.is_set() and not await forward.service_is_gone():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
        forward.end()


class _NobodyListens(ClusterError):
    """The pod exists, but nothing listens on the port."""


class _Forward:
    """Connections to the pod of one service; `gone` is set when the service has been deleted."""

    def __init__(self, service: str, namespace: str, context: str, gone: asyncio.Event) -> None:
        self.service = service
        self.namespace = namespace
        self.context = context
        self.gone = gone
        self._running: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def listening(self, local: int, remote: int) -> AsyncIterator[int]:
        """Accept connections for a port of the pod; yields the local port."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                await self._carry(remote, reader, writer)
            except Exception as error:  # any error ends only this connection; the log says why
                if not isinstance(cause := _cause(error), _NobodyListens):  # expected if there is no dashboard
                    print(f"port {remote} of {self.service}: {type(cause).__name__}: {cause}", file=sys.stderr)
            finally:
                self._running.discard(task)
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", local)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def service_is_gone(self) -> bool:
        """Return whether the service has been deleted; False if the API server does not answer."""
        try:
            async with connected(self.context, self.namespace) as api:
                return await api.get(CORE, f"services/{self.service}") is None
        except ClusterError:
            return False

    def end(self) -> None:
        """Close all connections."""
        for task in self._running:
            task.cancel()

    async def _carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._stream(port) as stream:
            ways = [asyncio.ensure_future(_up(reader, stream)), asyncio.ensure_future(_down(stream, writer))]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    way.result()
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _stream(self, port: int) -> AsyncIterator[AsyncWebSocketSession]:
        import httpx_ws

        async with connected(self.context, self.namespace) as api:
            pod = await self._pod(api)
            url = api.url(CORE, f"pods/{pod}/portforward")
            stream: AsyncWebSocketSession
            async with httpx_ws.aconnect_ws(
                url, api.session, params={"ports": str(port)}, extensions=api.extensions
            ) as stream:
                yield stream

    async def _pod(self, api: Kubernetes) -> str:
        """Return the name of the ready pod behind the service. Raises ClusterError if there is none."""
        service = await api.get(CORE, f"services/{self.service}")
        if service is None:
            self.gone.set()
            raise ClusterError(f"the service {self.service} does not exist any more")
        pods = await api.items(CORE, "pods", service["spec"]["selector"])
        ready = [str(pod["metadata"]["name"]) for pod in pods if is_ready(pod)]
        if not ready:
            raise ClusterError(f"no pod of the service {self.service} is ready")
        return ready[0]


def _cause(error: BaseException) -> BaseException:
    """Return the first exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _up(reader: asyncio.StreamReader, stream: AsyncWebSocketSession) -> None:
    while data := await reader.read(_CHUNK):
        await stream.send_bytes(bytes([_DATA]) + data)


async def _down(stream: AsyncWebSocketSession, writer: asyncio.StreamWriter) -> None:
    import httpx_ws

    opened = set()
    while True:
        try:
            frame = await stream.receive_bytes()
        except httpx_ws.WebSocketDisconnect:
            return
        channel, data = frame[0], frame[1:]
        if channel not in opened:
            opened.add(channel)  # the first frame of each channel repeats the port
        elif channel == _ERROR:
            raise _NobodyListens(data.decode(errors="replace"))
        else:
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    main()
