"""Access control of the console in a browser. Pure.

A server on loopback is still reached by every page that the user's browser shows, and by every user of the machine:
a page could open a websocket here, or have its own name resolve to this address. So each request must name this
machine as its host and hold a secret that only the user was shown. A request from another page is refused.
"""

from __future__ import annotations

import hmac
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Host names accepted, under any port: `ssh -L` may lead here from another one."""


class Knock(NamedTuple):
    """The facts of a request.

    Attributes:
        host: Its `Host` header.
        origin: Its `Origin` header, None without one.
        token: Token of its address, None without one.
        cookie: Its cookie, None without one.
        is_socket: Whether it asks for a websocket, which browsers open to any server from any page.
    """

    host: str
    origin: str | None
    token: str | None
    cookie: str | None
    is_socket: bool


class Answer(Enum):
    """Decision on a request."""

    COME_IN = "come in"
    TAKE_COOKIE = "take the cookie, and come again without the token"
    WRONG_HOST = "this is not the name of a server on your own machine"
    WRONG_ORIGIN = "this comes from another page"
    STRANGER = "open the address that rankdeck serve has printed, with its token"


def answer(knock: Knock, token: str, cookie: str) -> Answer:
    """Judge a request; `token` is what the printed address holds, `cookie` what a browser gets for it."""
    if _hostname(f"//{knock.host}") not in LOOPBACK_NAMES:
        return Answer.WRONG_HOST
    if knock.origin is None:
        # A page's own files are requested without one; a websocket never is, in a browser.
        if knock.is_socket:
            return Answer.WRONG_ORIGIN
    elif knock.origin != f"http://{knock.host}":
        return Answer.WRONG_ORIGIN
    if knock.cookie is not None and _is_same(knock.cookie, cookie):
        return Answer.COME_IN
    if knock.token is not None and not knock.is_socket and _is_same(knock.token, token):
        return Answer.TAKE_COOKIE
    return Answer.STRANGER


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _is_same(given: str, secret: str) -> bool:
    # Bytes of a header that are not UTF-8 have become surrogates.
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())
