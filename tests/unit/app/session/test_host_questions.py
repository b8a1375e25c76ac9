"""The walk from one host that wants an answer to the next, while other hosts go their own ways."""

from __future__ import annotations

import asyncio
import math

from app.errors import HostKeyError, HostUnreachableError
from app.session.hosts import Connections, HostQuestions
from app.ssh.questions import QuestionDesk
from tests.support.doors import Door
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

WAIT_S = 10.0


async def test_a_host_that_is_given_up_while_another_one_asks_is_waited_for_by_nobody() -> None:
    desk = QuestionDesk(LocalUser([]))
    asking, locked = (Door(host, desk, ("Code:", "1", False)) for host in ("h1", "h2"))
    locked.refusal = unreachable_reason = HostUnreachableError("h2", "takes none of our keys")
    unreachable_reason.is_answerable = True
    connections = Connections(these(asking, locked)._replace(away={"h2": unreachable_reason}), lambda _: None)
    questions = HostQuestions(desk, connections, lambda _: None)
    await connections.open(lambda _node, _frame, _age_s: None, math.inf, lambda _node: False, may_ask=True)
    try:
        await until_async(lambda: questions.waiting == ["h1", "h2"], WAIT_S, "both want an answer")
        going = asyncio.create_task(questions.begin())
        question = await until_async(lambda: questions.question, WAIT_S, "the first one asks")
        assert question is not None
        locked.refusal = HostKeyError("h2", "THE HOST KEY OF h2 HAS CHANGED")
        await until_async(lambda: not connections.waiting_reconnectors.get("h2"), WAIT_S, "the other one is given up")

        questions.answer(question.number, "1")
        await asyncio.wait_for(going, WAIT_S)

        assert asking.is_alive
        assert questions.waiting == []
    finally:
        questions.close()
        await connections.close()
