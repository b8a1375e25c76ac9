"""The console in a browser: served to the person who has the address, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from app.recording.records import encode_recording
from tests.support.recordings import frozen_recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


MIN_PICTURE_CHARS = 20_000
"""Of a screenshot with text in it; an empty page has 7,000."""


class Served:
    """`rankdeck serve -- replay FILE`, and its address."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address
        self.base, self.token = address.split("/?token=")

    def consoles(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    recording = frozen_recording()
    file = tmp_path / "frozen run.rankdeck"  # a shell is between: the blank must not divide it
    file.write_bytes(encode_recording(recording.opening, recording.records))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "app", "serve", "--", "replay", str(file), "--at", "15"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Served(process, line.decode().strip())
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 20)


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)


async def test_the_page_shows_the_console_and_takes_keys(served: Served, browser: aiohttp.ClientSession) -> None:
    async with browser.get(served.address) as page:
        assert page.status == 200
        assert str(page.url) == f"{served.base}/", "the token does not stay in the address"
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert f"{served.base}/ws".replace("http", "ws") in await page.text()

    async with browser.ws_connect(f"{served.base}/ws?width=120&height=35", origin=served.base) as ws:
        assert "is frozen" in await painted(ws, "is frozen")
        await ws.send_json(["stdin", "8"])
        assert "EVENTS" in await painted(ws, "EVENTS")
        assert len(served.consoles()) >= 1
    await until(lambda: not served.consoles())


async def painted(ws: aiohttp.ClientWebSocketResponse, wanted: str) -> str:
    """Return what has been painted until something wanted was."""
    text = ""
    async with asyncio.timeout(30):
        while wanted not in text:
            message = await ws.receive()
            assert message.type is aiohttp.WSMsgType.BINARY, message
            text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", message.data.decode("utf-8", "replace"))
    return text


async def test_strangers_and_other_pages_are_sent_away(served: Served, browser: aiohttp.ClientSession) -> None:
    for path, headers in (
        ("/", {}),
        ("/?token=guessed", {}),
        ("/static/js/textual.js", {}),
        (f"/?token={served.token}", {"Host": "evil.example"}),
        (f"/?token={served.token}", {"Origin": "http://evil.example"}),
    ):
        async with browser.get(served.base + path, headers=headers) as refused:
            assert refused.status == 403, path
            assert served.token not in await refused.text()
    async with browser.get(served.address) as page:
        assert page.status == 200
    for origin in (None, "http://evil.example", "null"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await browser.ws_connect(f"{served.base}/ws", origin=origin)
        assert caught.value.status == 403
    assert served.consoles() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
async def test_the_server_takes_its_consoles_along(
    served: Served, browser: aiohttp.ClientSession, number: signal.Signals, code: int
) -> None:
    async with browser.get(served.address):
        pass
    async with browser.ws_connect(f"{served.base}/ws", origin=served.base) as ws:
        await painted(ws, "frozen")
        consoles = served.consoles()
        served.process.send_signal(number)
        assert await asyncio.wait_for(served.process.wait(), 20) == code
    assert consoles
    await until(lambda: not any(console.is_running() for console in consoles))


async def test_a_taken_port_is_said_in_one_line(served: Served) -> None:
    port = served.base.rsplit(":", 1)[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "app", "serve", "--port", port, "--", "demo"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    why = "Address already in use (name another, or none)"
    assert said.decode() == f"rankdeck: port {port} cannot be listened on: {why}\n"


class Tab:
    """A page of a headless Chromium. Source: Chrome DevTools Protocol."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self._num_calls = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_calls += 1
        await self._ws.send_json({"id": self._num_calls, "method": method, "params": parameters})
        while True:
            said = json.loads((await self._ws.receive()).data)
            if said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"])[:500])
            if said.get("id") == self._num_calls:
                answer: dict[str, Any] = said.get("result", {})  # none while a page goes away
                return answer

    async def until_painted(self) -> None:
        """Wait until the page shows more than a surface of one colour."""
        async with asyncio.timeout(60):
            while len((await self.call("Page.captureScreenshot", format="png")).get("data", "")) < MIN_PICTURE_CHARS:  # noqa: ASYNC110 - Chromium
                await asyncio.sleep(0.2)

    async def value(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression))["result"].get("value")


@pytest.fixture
async def tab(tmp_path: Path, browser: aiohttp.ClientSession) -> AsyncIterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    profile = tmp_path / "profile"
    chromium = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
            *(f"--user-data-dir={profile}", "--window-size=1400,900", "about:blank"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        told = profile / "DevToolsActivePort"
        await until(lambda: told.exists() and "\n" in told.read_text())
        port = told.read_text().split()[0]
        async with browser.get(f"http://127.0.0.1:{port}/json") as pages:
            (page,) = [one for one in await pages.json() if one["type"] == "page"]
        async with browser.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as ws:
            yield Tab(ws)
    finally:
        chromium.terminate()
        chromium.wait(20)


async def test_a_real_browser_opens_it(served: Served, tab: Tab) -> None:
    await tab.call("Runtime.enable")
    await tab.call("Page.enable")
    await tab.call("Page.navigate", url=served.address)
    await tab.until_painted()
    assert await tab.value("location.href") == f"{served.base}/"
    assert tab.complaints == []
