"""Controls a headless Chromium through its DevTools protocol; aiohttp is the client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-crash-reporter",
    "--remote-debugging-port=0", "--hide-scrollbars", "--disable-extensions", "--no-proxy-server",
)  # fmt: skip


class Browser:
    """A page of a browser. problems: errors of the console, violations of the policy and exceptions, as texts.

    requests: the addresses that the page has asked for, except the page itself and data: addresses.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, profile: Path) -> AsyncIterator[Self]:
        """Start the browser with a new profile in that folder, and end it afterwards."""
        process = _started(profile)
        try:
            port = await _port_of(profile / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    browser = cls(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await browser.send(f"{domain}.enable")
                    yield browser
                    browser._reader.cancel()
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(future, 60)

    async def open(self, url: str, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        """Open an address and wait until it is loaded."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=theme)
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        await self.reloaded()

    async def reloaded(self) -> None:
        """Wait until the page has been loaded again since the last call of this method or of `open`."""
        await asyncio.wait_for(self._loaded.wait(), 60)
        self._loaded.clear()

    async def run(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def key(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key)

    async def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the mouse at one place and release it at another one."""
        await self.send(
            "Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1
        )
        for share in (0.5, 1.0):
            at = {"x": x + share * (to_x - x), "y": y + share * (to_y - y)}
            await self.send("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **at)
        await self.send("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, button="left", clickCount=1)

    async def picture(self) -> bytes:
        """Return the visible part of the page as PNG."""
        shot = await self.send("Page.captureScreenshot")
        return base64.b64decode(shot["data"])

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (number := event.get("id")) is not None:
                self._answers.pop(number).set_result(event.get("result", {"error": event.get("error")}))
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and params["type"] == "error"):
            self.problems.append(str(params))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if params.get("type") != "Document" and not url.startswith("data:"):
                self.requests.append(url)


def _started(profile: Path) -> subprocess.Popen[bytes]:
    assert CHROMIUM is not None
    return subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _port_in(file: Path) -> int | None:
    """The port that the browser has written; None until it has."""
    try:
        return int(file.read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


async def _port_of(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = asyncio.get_running_loop().time() + _START_S
    while asyncio.get_running_loop().time() < deadline:
        assert process.poll() is None, "the browser has ended"
        if (port := _port_in(file)) is not None:
            return port
        await asyncio.sleep(0.05)
    raise TimeoutError("the browser does not answer")
