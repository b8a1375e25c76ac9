"""A page's console ends with its page, its pipes or its server, whenever that happens, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest

from app.recording.records import encode_recording
from app.web.server import DRIVER, MAX_PAGES
from tests.support.long_tests import one_in
from tests.support.recordings import frozen_recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.fault

END_S = 5.0
"""Within which a console is to be gone."""
BUSY_S = 5.0
"""Patience beyond that, on a machine with other work."""
MOMENTS_S = (0.0, 0.4, 0.8, 1.2, 2.5)
"""Before the interpreter has started, before the first frame, and after."""
WIDTH = "width=120&height=35"


class Served:
    """`rankdeck serve -- COMMAND`, and a browser that has its address."""

    def __init__(
        self, process: asyncio.subprocess.Process, address: str, browser: aiohttp.ClientSession, runtime: Path
    ) -> None:
        self.process = process
        self.runtime = runtime
        self.base, self.token = address.split("/?token=")
        self.browser = browser
        self.seen: set[psutil.Process] = set()
        self._server = psutil.Process(process.pid)

    async def opened(self) -> aiohttp.ClientWebSocketResponse:
        return await self.browser.ws_connect(f"{self.base}/ws?{WIDTH}", origin=self.base)

    def left(self) -> list[psutil.Process]:
        """Return what runs below the server, or has."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen.update(self._server.children(recursive=True))
        for process in [*self.seen]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen.update(process.children(recursive=True))
        return [process for process in self.seen if process.is_running()]

    async def until_left(self, *, num: int = 0) -> None:
        """Wait until no more than some processes are left; without any, no file is either."""
        until_s = time.monotonic() + END_S + BUSY_S
        while len(left := self.left()) > num or (num == 0 and os.listdir(self.runtime)):  # noqa: PTH208
            await asyncio.sleep(0.05)
            if time.monotonic() > until_s:
                pytest.fail(f"left: {[*map(_described, left)]}, {os.listdir(self.runtime)}")  # noqa: PTH208

    def num_fds(self) -> int:
        return self._server.num_fds()

    def rss_mib(self) -> float:
        return float(self._server.memory_info().rss / 2**20)


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()[3:])
    return ""


@contextlib.asynccontextmanager
async def serving(runtime: Path, *command: str) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "app", "serve", "--", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        try:
            assert process.stdout is not None
            address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
            async with browser.get(address) as page:
                assert page.status == 200
            served = Served(process, address, browser, runtime)
            yield served
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            _, errors = await asyncio.wait_for(process.communicate(), END_S + BUSY_S)
            await served.until_left()
            assert b"Traceback" not in errors, errors.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("r")
    directory.chmod(0o700)
    return directory


@pytest.fixture
def replay(tmp_path: Path) -> tuple[str, ...]:
    recording = frozen_recording()
    file = tmp_path / "frozen run.rankdeck"
    file.write_bytes(encode_recording(recording.opening, recording.records))
    return ("replay", str(file), "--at", "15")


async def seen_for(page: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
    """Read what is painted, as a browser does, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for _ in page:
                pass


async def painted(page: aiohttp.ClientWebSocketResponse) -> None:
    """Wait for the first frame."""
    async with asyncio.timeout(60):
        async for message in page:
            if len(message.data) > 4096:
                return


async def closed(page: aiohttp.ClientWebSocketResponse) -> None:
    await page.close()


async def gone(page: aiohttp.ClientWebSocketResponse) -> None:
    """Cut the connection, as a browser does that is killed."""
    assert page._writer.transport is not None
    page._writer.transport.abort()
    page._response.close()


@pytest.mark.parametrize("end", [gone, pytest.param(closed, marks=pytest.mark.slow)])
async def test_a_visit_of_any_length_leaves_nothing(runtime: Path, end: Callable[..., object]) -> None:
    async with serving(runtime, "demo") as served:
        for moment_s in MOMENTS_S:
            page = await served.opened()
            await seen_for(page, moment_s)
            served.left()
            await end(page)  # type: ignore[misc]
            await served.until_left()


@pytest.mark.parametrize("end", one_in(3, [(number, s) for number in ("KILL", "TERM") for s in (0.8, 0.0, 3.0)]))
async def test_the_server_takes_its_consoles_along_whenever_it_ends(runtime: Path, end: tuple[str, float]) -> None:
    number, moment_s = signal.Signals[f"SIG{end[0]}"], end[1]
    async with serving(runtime, "demo") as served:
        pages = [await served.opened() for _ in range(2)]  # neither reads, nor answers that it is closed
        await asyncio.sleep(moment_s)
        served.left()
        served.process.send_signal(number)
        assert await asyncio.wait_for(served.process.wait(), END_S + BUSY_S) in {130, -number}
        await served.until_left()
        for page in pages:
            await gone(page)


async def test_a_console_that_hangs_is_ended(runtime: Path, replay: tuple[str, ...]) -> None:
    async with serving(runtime, *replay) as served:
        page = await served.opened()
        await painted(page)
        for process in served.left():
            process.suspend()
        await closed(page)
        await served.until_left()


@pytest.mark.parametrize(("what", "moment_s"), [("stdin", 0.0), ("stdout", 3.0)])
def test_a_console_ends_when_a_pipe_does(runtime: Path, what: str, moment_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "app", "demo"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **DRIVER, "XDG_RUNTIME_DIR": str(runtime)},
    ) as console:
        time.sleep(moment_s)
        pipe = getattr(console, what)
        pipe.close()
        assert console.wait(END_S + BUSY_S) is not None
        assert console.stderr is not None
        assert b"Traceback" not in console.stderr.read()


async def test_a_question_that_nobody_answers_keeps_no_console(runtime: Path, replay: tuple[str, ...]) -> None:
    async with serving(runtime, *replay) as served:
        page = await served.opened()
        await painted(page)
        await page.send_json(["stdin", "/"])
        await page.send_json(["stdin", "rank"])
        await seen_for(page, 0.3)
        await gone(page)
        await served.until_left()


async def test_what_a_page_sends_that_is_no_message_ends_nothing_else(runtime: Path, replay: tuple[str, ...]) -> None:
    async with serving(runtime, *replay) as served:
        other = await served.opened()
        await painted(other)
        for text in ("no json", "[]", '["resize", 3]', '["resize", {"width": -1, "height": 1e99}]', '["stdin", null]'):
            page = await served.opened()
            await page.send_str(text)
            await gone(page)
        await other.send_json(["ping", 7])
        async with asyncio.timeout(10):
            async for message in other:
                if message.type is aiohttp.WSMsgType.TEXT:
                    assert message.json() == ["pong", 7]
                    break
        await closed(other)
        await served.until_left()


async def test_the_number_of_pages_is_bounded(runtime: Path, replay: tuple[str, ...]) -> None:
    async with serving(runtime, *replay) as served:
        pages = [await served.opened() for _ in range(MAX_PAGES)]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await served.opened()
        assert refused.value.status == 503
        async with served.browser.get(f"{served.base}/") as page:
            assert page.status == 503
            assert "close one" in await page.text()
        await gone(pages.pop())
        await served.until_left(num=MAX_PAGES - 1)
        pages.append(await served.opened())
        for one in pages:
            await gone(one)
        await served.until_left()


@pytest.mark.parametrize("num_visits", [24, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_hundred_visits_leave_no_process_no_descriptor_and_no_memory(
    runtime: Path, replay: tuple[str, ...], num_visits: int
) -> None:
    async with serving(runtime, *replay) as served:

        async def visit(number: int) -> None:
            page = await served.opened()
            await seen_for(page, 0.02 * (number % 40))
            await (closed, gone)[number % 2](page)

        async def visits(first: int, last: int) -> tuple[int, float]:
            for number in range(first, last, 4):
                await asyncio.gather(*(visit(number + at) for at in range(4)))
                await served.until_left()
            return served.num_fds(), served.rss_mib()

        fds, mib = await visits(0, 12)
        fds_later, mib_later = await visits(12, num_visits)
        assert fds_later <= fds
        assert mib_later <= mib + 8
