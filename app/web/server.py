"""Serves the console to a browser by textual-serve, behind access control.

Each page has a console process of its own, which ends with the page: what the page steers lives in the agents. By
itself, textual-serve accepts any request (seen with 1.1.3: a websocket from another origin was accepted).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import TYPE_CHECKING

from aiohttp import web
from textual_serve.server import Server

from app.ssh.config import LOOPBACK
from app.web.access import Answer, Knock, answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOKEN_BYTES = 32
MAX_PAGES = 8
"""Limit of open consoles: each page has a process of its own."""
CLOSE_S = 5.0
"""Timeout in seconds for the consoles to end in an orderly way."""
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
        secret: Part of the address; another one each time.
    """

    def __init__(self, command: str, title: str) -> None:
        """`command` is a shell's; it opens a Textual screen."""
        super().__init__(command, host=LOOPBACK, title=title)
        self.secret = secrets.token_urlsafe(TOKEN_BYTES)
        self._num_pages = 0
        self._cookie_name = "rankdeck"

    async def run(self, port: int, on_ready: Callable[[str], None]) -> None:
        """Serve until cancelled; `on_ready` takes the address once it is served.

        Raises:
            OSError: The port is taken.
        """
        logging.getLogger("textual-serve").setLevel(logging.ERROR)
        server_socket = socket.create_server((LOOPBACK, port))
        port = server_socket.getsockname()[1]
        # A browser sends a cookie to every port of a machine: two servers must not take each other's.
        self._cookie_name = f"rankdeck-{port}"
        runner = web.AppRunner(await self._make_app(), handle_signals=False, shutdown_timeout=CLOSE_S, access_log=None)
        await runner.setup()
        try:
            await web.SockSite(runner, server_socket).start()
            on_ready(f"http://{LOOPBACK}:{port}/?token={self.secret}")
            await asyncio.Event().wait()
        finally:
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
        self.public_url = f"http://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Open a console of its own for a page."""
        if self._num_pages >= MAX_PAGES:
            raise web.HTTPServiceUnavailable(text=f"{MAX_PAGES} consoles are open: close one")
        self._num_pages += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._num_pages -= 1

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Accept or refuse a request, and set the headers that keep its answer from going elsewhere."""
        knock = Knock(
            host=request.headers.get("Host", ""),
            origin=request.headers.get("Origin"),
            token=request.query.get("token"),
            cookie=request.cookies.get(self._cookie_name),
            is_socket="upgrade" in request.headers.get("Connection", "").lower() or request.path == "/ws",
        )
        verdict = answer(knock, self.secret)
        if verdict is Answer.TAKE_COOKIE:
            response: web.StreamResponse = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            response.set_cookie(self._cookie_name, self.secret, httponly=True, samesite="Strict", path="/")
            return response
        if verdict is not Answer.COME_IN:
            return web.Response(status=403, text=f"{verdict.value}\n", headers=_HEADERS)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response
