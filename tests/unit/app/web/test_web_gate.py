"""Who may come in to the console in a browser."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from app.cli.hosts import served_command
from app.errors import UsageError
from app.web.access import LOOPBACK_NAMES, Answer, Knock, answer
from app.web.server import WebConsole

TOKEN = "the-secret"
COOKIE = "another secret"
HOST = "127.0.0.1:4000"
OWN = f"http://{HOST}"


def knock(
    host: str = HOST,
    origin: str | None = None,
    *,
    token: str | None = None,
    cookie: str | None = COOKIE,
    is_socket: bool = False,
) -> Knock:
    return Knock(host, origin, token, cookie, is_socket)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (knock(), Answer.COME_IN),
        (knock(origin=OWN, is_socket=True), Answer.COME_IN),
        (knock("localhost:9", "http://localhost:9", is_socket=True), Answer.COME_IN),
        (knock("[::1]:9", "http://[::1]:9", is_socket=True), Answer.COME_IN),
        (knock(cookie=None, token=TOKEN), Answer.TAKE_COOKIE),
        (knock(cookie="old", token=TOKEN), Answer.TAKE_COOKIE),
        (knock(cookie=None), Answer.STRANGER),
        (knock(cookie="old"), Answer.STRANGER),
        (knock(cookie=TOKEN), Answer.STRANGER),
        (knock(cookie=None, token=COOKIE), Answer.STRANGER),
        (knock(cookie=None, token="guessed"), Answer.STRANGER),
        (knock(cookie="ä", token="ö"), Answer.STRANGER),
        (knock(cookie="\udcff", token="\udc80"), Answer.STRANGER),
        (knock(cookie=None, token=TOKEN, origin=OWN, is_socket=True), Answer.STRANGER),
        (knock(is_socket=True), Answer.WRONG_ORIGIN),
        (knock(origin="http://evil.example", is_socket=True), Answer.WRONG_ORIGIN),
        (knock(origin="http://127.0.0.1:4001", is_socket=True), Answer.WRONG_ORIGIN),
        (knock(origin="https://127.0.0.1:4000"), Answer.WRONG_ORIGIN),
        (knock(origin="null"), Answer.WRONG_ORIGIN),
        (knock("evil.example", token=TOKEN), Answer.WRONG_HOST),
        (knock("127.0.0.1.evil.example:4000", origin="http://127.0.0.1.evil.example:4000"), Answer.WRONG_HOST),
        (knock(""), Answer.WRONG_HOST),
        (knock("[::1"), Answer.WRONG_HOST),
    ],
)
def test_only_the_persons_own_page_comes_in(asked: Knock, expected: Answer) -> None:
    assert answer(asked, TOKEN, COOKIE) is expected


KNOWN = [HOST, OWN, TOKEN, COOKIE, "localhost", "http://localhost", "null", "::1"]
TEXTS = st.text(max_size=20) | st.sampled_from(KNOWN)


@given(
    st.builds(
        Knock,
        host=TEXTS,
        origin=st.none() | TEXTS,
        token=st.none() | TEXTS,
        cookie=st.none() | TEXTS,
        is_socket=st.booleans(),
    )
)
def test_nobody_comes_in_without_the_secret_nor_a_socket_from_another_page(asked: Knock) -> None:
    verdict = answer(asked, TOKEN, COOKIE)
    if verdict is Answer.COME_IN:
        assert asked.cookie == COOKIE
        assert not asked.is_socket or asked.origin == f"http://{asked.host}"
    if verdict is Answer.TAKE_COOKIE:
        assert asked.token == TOKEN
        assert not asked.is_socket
    if verdict in {Answer.COME_IN, Answer.TAKE_COOKIE}:
        assert any(name in asked.host.lower() for name in LOOPBACK_NAMES)


async def test_two_servers_whose_own_ports_are_the_same_keep_their_cookies_apart_in_one_browser() -> None:
    """`ssh -L` leads to them from two ports of the machine with the browser."""
    at_port = {9001: WebConsole(["rankdeck"], "one"), 9002: WebConsole(["rankdeck"], "two")}
    jar: dict[str, str] = {}

    async def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="come in")

    async def ask(port: int, path: str) -> web.StreamResponse:
        sent = {"Host": f"127.0.0.1:{port}", "Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
        return await at_port[port]._guard(make_mocked_request("GET", path, sent), page)

    for port, server in at_port.items():
        taken = await ask(port, f"/?token={server.token}")
        jar.update({name: cookie.value for name, cookie in taken.cookies.items()})
    assert [(await ask(port, "/")).status for port in at_port] == [200, 200]


def test_a_page_only_looks_on_unless_control_is_asked_for() -> None:
    attach = ("attach", "--host", "gpu1")
    assert served_command(attach, may_control=False) == ["attach", "--read-only", "--host", "gpu1"]
    assert served_command(attach, may_control=True) == list(attach)
    assert served_command((*attach, "--read-only"), may_control=False) == [*attach, "--read-only"]
    assert served_command(("replay", "x.zip"), may_control=False) == ["replay", "x.zip"]


@pytest.mark.parametrize("command", [("run", "--host", "h", "--", "x.py"), ("stop", "job"), ("demo", "--json")])
def test_what_opens_no_console_again_and_again_is_not_served(command: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        served_command(command, may_control=True)
