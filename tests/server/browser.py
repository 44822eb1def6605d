"""Headless Chromium, driven over its debugging protocol."""

import asyncio
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_TIMEOUT_S = 30.0


class Tab:
    """A page that is open. `problems` are messages of its console, such as refusals by a policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count()

    async def call(self, method: str, **params: object) -> Any:
        """Call a method of the protocol; returns its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]
                if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.problems.append(json.dumps(message["params"]))

    async def open(self, url: str) -> None:
        for domain in ("Log", "Runtime", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not await self.value(script):
            if time.monotonic() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(f"never {script}: {text!r}, {self.problems}")
            await asyncio.sleep(0.05)

    async def type(self, text: str) -> None:
        """Type into the element with the focus; "\\n" is Enter."""
        for part in text.splitlines(keepends=True):
            await self.call("Input.insertText", text=part.rstrip("\n"))
            if part.endswith("\n"):
                key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
                await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
                await self.call("Input.dispatchKeyEvent", type="keyUp", **key)


@asynccontextmanager
async def browser_tab(*flags: str) -> AsyncIterator[Tab]:
    """An empty tab of a new browser."""
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    data = f"--user-data-dir={profile}"
    command = [str(CHROMIUM), *_QUIET, data, "--remote-debugging-port=0", *flags, "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(_TIMEOUT_S):
            while not (port_file.exists() and port_file.read_text().count("\n")):
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as listed:
                (page,) = (tab for tab in await listed.json() if tab["type"] == "page")
            url = page["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=2**26) as socket:
                yield Tab(socket)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)
