"""Serves the console to a browser with textual-serve's page, behind access control.

Each page has a console process of its own, which ends with the page: what the page steers lives in the agents. The
server holds the only other ends of its pipes, so that it ends with the server too (`app.cli.presenting`). By itself,
textual-serve 1.1.3 accepts any request, and waits without limit for a console that it has asked to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web
from textual_serve.server import Server, to_int

from app.ssh.config import LOOPBACK
from app.web.access import Answer, Knock, answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOKEN_BYTES = 32
MAX_PAGES = 8
"""Limit of open consoles: each page has a process of its own."""
LEAVE_S = 4.0
"""Seconds for a console to end by itself; it gives up a second earlier."""
CLOSE_S = 0.5
"""Seconds for a page to answer that it is closed."""
HEARTBEAT_S = 15.0
"""Seconds between two signs of life of a page."""
MAX_WAITING_BYTES = 1 << 20
"""Bytes typed that wait for a console; what is typed beyond is lost."""
MAX_CELLS = 1000
"""Largest width and height of a screen."""
DRIVER = {
    "TEXTUAL_DRIVER": "app.tui.rendering:PageDriver",
    "TEXTUAL_FPS": "60",
    "TEXTUAL_COLOR_SYSTEM": "truecolor",
}
"""How Textual is asked to talk with pipes. Source: textual_serve.app_service and textual.drivers.web_driver."""
FIRST_LINE = b"__GANGLION__\n"
_HEADERS = {
    # Nothing is fetched from elsewhere, the page is shown in no other page, and its address is sent to no other site.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class WebConsole(Server):
    """One command's screen, for every browser that has the address.

    Attributes:
        token: Part of the address; another one each time.
    """

    def __init__(self, argv: Sequence[str], title: str) -> None:
        """`argv` opens a Textual screen."""
        super().__init__(argv[0], host=LOOPBACK, title=title)
        self._argv = tuple(argv)
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self._cookie = secrets.token_urlsafe(TOKEN_BYTES)
        self._pages: set[asyncio.Task[Any]] = set()
        """A task for each page, until its console has ended."""

    async def run(self, port: int, on_ready: Callable[[str], None]) -> None:
        """Serve until cancelled; `on_ready` takes the address once it is served.

        Raises:
            OSError: The port is taken.
        """
        server_socket = socket.create_server((LOOPBACK, port))
        port = server_socket.getsockname()[1]
        runner = web.AppRunner(await self._make_app(), handle_signals=False, shutdown_timeout=CLOSE_S, access_log=None)
        await runner.setup()
        try:
            await web.SockSite(runner, server_socket).start()
            on_ready(f"http://{LOOPBACK}:{port}/?token={self.token}")
            await asyncio.Event().wait()
        finally:
            for page in self._pages:
                page.cancel()
            await asyncio.gather(*self._pages, return_exceptions=True)
            await runner.cleanup()

    async def on_startup(self, app: web.Application) -> None:
        """Print no banner."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app.middlewares.append(guard)
        return app

    async def handle_index(self, request: web.Request) -> web.StreamResponse:
        """Return the page, whose websocket is where the page came from: `ssh -L` may have another port there."""
        self._check_room()
        self.public_url = f"http://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Open a console of its own for a page; it has ended when this returns."""
        self._check_room()
        task = asyncio.current_task()
        assert task is not None
        self._pages.add(task)
        page = web.WebSocketResponse(heartbeat=HEARTBEAT_S, timeout=CLOSE_S)
        try:
            await page.prepare(request)
            size = [to_int(request.query.get(name, ""), cells) for name, cells in (("width", 80), ("height", 24))]
            await self._show(page, *size)
        finally:
            self._pages.discard(task)
        return page

    def _check_room(self) -> None:
        if len(self._pages) >= MAX_PAGES:
            raise web.HTTPServiceUnavailable(text=f"{MAX_PAGES} consoles are open: close one\n")

    async def _show(self, page: web.WebSocketResponse, width: int, height: int) -> None:
        # Without a shell between: the console is to notice the end of its server.
        console = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **DRIVER, "COLUMNS": str(_cells(width)), "ROWS": str(_cells(height))},
        )
        assert console.stdin is not None
        assert console.stdout is not None
        painting = asyncio.create_task(_paint(page, console.stdout))
        try:
            # It sends what no page of ours does, or is gone.
            with contextlib.suppress(ValueError, RecursionError, ConnectionError):
                await _take_input(page, console.stdin)
        finally:
            painting.cancel()
            await asyncio.gather(painting, return_exceptions=True)
            await _end(console)

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Accept or refuse a request, and set the headers that keep its answer from going elsewhere."""
        host = request.headers.get("Host", "")
        cookie_name = _cookie_name(host)
        knock = Knock(
            host=host,
            origin=request.headers.get("Origin"),
            token=request.query.get("token"),
            cookie=request.cookies.get(cookie_name),
            is_socket="upgrade" in request.headers.get("Connection", "").lower() or request.path == "/ws",
        )
        verdict = answer(knock, self.token, self._cookie)
        if verdict is Answer.TAKE_COOKIE:
            response: web.StreamResponse = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            response.set_cookie(cookie_name, self._cookie, httponly=True, samesite="Strict", path="/")
            return response
        if verdict is not Answer.COME_IN:
            return web.Response(status=403, text=f"{verdict.value}\n", headers=_HEADERS)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response


def _cookie_name(host: str) -> str:
    """Return the name of the cookie for a `Host` header.

    A browser sends a cookie to every port of a machine, and two servers must not take each other's: the port is the one
    that the browser knows, since `ssh -L` may lead from two ports of one machine to the same one of two others.
    """
    port = host.rpartition(":")[2]
    return f"rankdeck-{port}" if port.isascii() and port.isdigit() else "rankdeck"


async def _paint(page: web.WebSocketResponse, output: asyncio.StreamReader) -> None:
    """Pass on what the console paints; close the page when it ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ValueError, ConnectionError):
        if await output.readline() == FIRST_LINE:
            while True:
                head = await output.readexactly(5)
                packet = await output.readexactly(int.from_bytes(head[1:], "big"))
                if head[:1] == b"D":
                    await page.send_bytes(packet)
    await page.close()


async def _take_input(page: web.WebSocketResponse, console: asyncio.StreamWriter) -> None:
    """Pass on what the page sends until it is closed.

    Raises:
        ValueError: It sends something else than a message.
    """
    async for message in page:
        if message.type is WSMsgType.ERROR:
            return
        match message.json():
            case ["stdin", str(keys)]:
                _send(console, b"D", keys.encode(errors="replace"))
            case ["resize", {"width": int(width), "height": int(height)}]:
                _send_event(console, "resize", width=_cells(width), height=_cells(height))
            case ["focus" | "blur" as kind, *_]:
                _send_event(console, kind)
            case ["ping", data]:
                await page.send_json(["pong", data])


def _cells(number: int) -> int:
    return max(1, min(number, MAX_CELLS))


def _send_event(console: asyncio.StreamWriter, kind: str, **what: int) -> None:
    _send(console, b"M", json.dumps({"type": kind, **what}).encode())


def _send(console: asyncio.StreamWriter, kind: bytes, payload: bytes) -> None:
    if console.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
        console.write(kind + len(payload).to_bytes(4, "big") + payload)


async def _end(console: asyncio.subprocess.Process) -> None:
    """Close the pipe that the console watches, and wait for its end; kill it if it does not come."""
    assert console.stdin is not None
    console.stdin.transport.abort()  # whatever it has not read yet
    try:
        async with asyncio.timeout(LEAVE_S):
            await console.communicate()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            console.kill()
        await console.wait()
