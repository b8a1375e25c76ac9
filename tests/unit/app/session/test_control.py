"""The order of what people wish for a job, over roads that a test blocks, breaks or lets refuse."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.commands import (
    Abort,
    Accepted,
    Command,
    Commit,
    GetStatus,
    Kill,
    PrepareAgain,
    RefusalReason,
    Refused,
    Reply,
    Status,
    Stop,
    decode_command,
    encode_command,
)
from agent.wire.jobs import JobState, JobStatus
from app.errors import AgentRefusedError, AgentUnreachableError, UsageError
from app.fleet.fleet import Fleet
from app.session.audit import AuditLog
from app.session.control import JobControl
from tests.support.node_reports import job_status, node_report
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Callable

LEFTOVERS = Refused(RefusalReason.WRONG_STATE, "processes of the last attempt are still there")
STRANGE = Refused(RefusalReason.UNKNOWN_JOB, "there is no job j on this node; those here: none")


class NodeRoad:
    """The road to a node with at most one job, which ends at once when it is told to.

    Attributes:
        heard: The commands that came, without those that ask how it is.
        status: Of the job; None while the node knows none.
        answers: What is said to a kind of command, instead of carrying it out; an exception is raised.
        gate: While it is not set, a `PrepareAgain` is not answered.
    """

    def __init__(self, status: JobStatus | None) -> None:
        self.heard: list[Command] = []
        self.status = status
        self.answers: dict[type[Command], Callable[[], Reply]] = {}
        self._before = status
        self.gate = asyncio.Event()
        self.gate.set()

    async def request(self, command: Command) -> Reply:
        command = decode_command(encode_command(command))
        if not isinstance(command, GetStatus):
            self.heard.append(command)
        if isinstance(command, PrepareAgain):
            await self.gate.wait()
        if answer := self.answers.get(type(command)):
            return answer()
        if isinstance(command, GetStatus):
            return Status(node_report(1, [] if self.status is None else [self.status], []))
        if self.status is None:
            return STRANGE
        match command:
            case PrepareAgain(attempt=attempt, world_size=world_size):
                self._before = self.status
                self._become(state=JobState.PREPARED, attempt=attempt, world_size=world_size)
            case Commit():
                self._become(state=JobState.RUNNING)
            case Abort():
                self.status = self._before
            case Stop() | Kill() if self.status.state in {JobState.RUNNING, JobState.PREPARED}:
                self._become(state=JobState.STOPPED, state_s=0.0)
        return Accepted()

    async def close(self) -> None:
        """There is nothing to let go of."""

    def kinds(self) -> list[str]:
        """Return what came, by the names of the commands."""
        return [type(command).__name__ for command in self.heard]

    def _become(self, **changes: object) -> None:
        assert self.status is not None
        self.status = msgspec.structs.replace(self.status, **changes)


def road(state: JobState = JobState.RUNNING, num_nodes: int = 1) -> NodeRoad:
    """Return the road to a node with job `j`, of which it runs two ranks."""
    shape = {"world_size": 2 * num_nodes, "num_nodes": num_nodes, "local_world_size": 2}
    return NodeRoad(job_status(job_id="j", state=state, attempt=0, **shape))


def three_nodes(state: JobState = JobState.RUNNING) -> dict[str, NodeRoad]:
    """Return the roads to the nodes of a job, in the order of their ranks."""
    channels = {f"n{index}": road(state, num_nodes=3) for index in range(3)}
    for index, one in enumerate(channels.values()):
        assert one.status is not None
        one.status = msgspec.structs.replace(one.status, node_rank=index)
    return channels


def control_over(**channels: NodeRoad) -> JobControl:
    fleet = Fleet(channels)
    return JobControl(lambda: fleet, list(channels), lambda _sentence: None, AuditLog(None))


def unreachable(node: str) -> Callable[[], Reply]:
    def raise_it() -> Reply:
        raise AgentUnreachableError(node, "no reply in 10 s")

    return raise_it


async def test_what_a_lost_console_has_prepared_is_taken_back_before_a_restart() -> None:
    channels = three_nodes(JobState.STOPPED)
    again = PrepareAgain("j", 1, 4, 2, 6)
    assert await channels["n2"].request(again) == Accepted()
    assert channels["n2"].status is not None
    assert channels["n2"].status.state is JobState.PREPARED

    told = await control_over(**channels).restart("j")

    assert told == "job j restarts with 6 ranks (restart 1)"
    assert channels["n2"].kinds() == ["PrepareAgain", "Abort", "PrepareAgain", "Commit"]
    assert [one.status.state for one in channels.values() if one.status] == [JobState.RUNNING] * 3


async def test_a_restart_takes_the_attempt_above_all_that_its_nodes_keep() -> None:
    channels = three_nodes(JobState.STOPPED)

    def refuse(road: NodeRoad, free: int) -> Callable[[], Reply]:
        def answer() -> Reply:
            del road.answers[PrepareAgain]
            return Refused(RefusalReason.JOB_EXISTS, f"jobs/j/{free - 1} exists already", free)

        return answer

    for node, free in (("n0", 5), ("n2", 8)):
        channels[node].answers[PrepareAgain] = refuse(channels[node], free)

    assert await control_over(**channels).restart("j") == "job j restarts with 6 ranks (restart 8)"
    assert {one.status.attempt for one in channels.values() if one.status} == {8}


async def test_a_restart_that_a_node_refuses_whatever_its_attempt_ends() -> None:
    node = road(JobState.STOPPED)
    node.answers[PrepareAgain] = lambda: Refused(RefusalReason.JOB_EXISTS, "jobs/j/4 exists already", 5)

    with pytest.raises(AgentRefusedError, match="exists already"):
        await control_over(n0=node).restart("j")
    assert node.kinds() == ["PrepareAgain", "PrepareAgain"]


async def test_a_job_of_another_launcher_is_not_ended_for_a_restart_that_cannot_be() -> None:
    node = road()
    assert node.status is not None
    node.status = msgspec.structs.replace(node.status, ranks=[0, 1])
    with pytest.raises(UsageError, match="was started by another launcher"):
        await control_over(n0=node).restart("j")
    assert node.heard == []


@pytest.mark.parametrize("is_immediate", [False, True])
@pytest.mark.parametrize(
    ("num_nodes", "num_ranks", "words"),
    [(1, 5000, "5000 ranks are too many"), (1, 0, "0 ranks are too few"), (2, None, "only 1 of the 2 nodes")],
)
async def test_a_job_that_cannot_begin_again_is_not_ended_for_it(
    num_nodes: int, num_ranks: int | None, words: str, *, is_immediate: bool
) -> None:
    node = road(num_nodes=num_nodes)
    with pytest.raises(UsageError, match=words):
        await control_over(n0=node).restart("j", num_ranks, is_immediate=is_immediate)
    assert node.heard == []


@pytest.mark.parametrize("wish", ["kill", "stop"])
async def test_what_ends_a_job_is_the_last_word_while_its_next_attempt_waits_for_leftovers(wish: str) -> None:
    node = road(JobState.STOPPED)
    node.answers[PrepareAgain] = lambda: LEFTOVERS
    control = control_over(n0=node)
    restart = asyncio.create_task(control.restart("j"))
    await until_async(lambda: node.heard, 10, "the restart to be refused")

    await (control.kill("j") if wish == "kill" else control.stop("j", is_agreed=True))
    del node.answers[PrepareAgain]

    assert await restart == "the restart of job j was given up for another wish"
    assert control.doing == ""
    assert "Commit" not in node.kinds()
    assert node.status is not None
    assert node.status.state is JobState.STOPPED


@pytest.mark.parametrize("wish", ["kill", "stop"])
async def test_what_ends_a_job_ends_the_attempt_that_is_just_being_begun(wish: str) -> None:
    node = road(JobState.STOPPED)
    node.gate.clear()
    control = control_over(n0=node)
    restart = asyncio.create_task(control.restart("j"))
    await until_async(lambda: node.heard, 10, "the attempt to be prepared")
    end = asyncio.create_task(control.kill("j") if wish == "kill" else control.stop("j", is_agreed=True))
    await asyncio.sleep(0)

    node.gate.set()

    assert await restart == "job j restarts with 2 ranks (restart 1)"
    await end
    assert node.kinds() == ["PrepareAgain", "Commit", wish.capitalize()]
    assert node.status is not None
    assert node.status.state is JobState.STOPPED


async def test_a_kill_reaches_the_other_nodes_when_one_is_silent_and_says_so() -> None:
    silent, other, strange = road(), road(), NodeRoad(None)
    for kind in (GetStatus, Kill):
        silent.answers[kind] = unreachable("n0")
    with pytest.raises(AgentUnreachableError, match="the agent on n0 does not answer") as caught:
        await control_over(n0=silent, n1=other, n2=strange).kill("j")
    assert caught.value.hint == "job j was killed on n1"
    assert other.status is not None
    assert other.status.state is JobState.STOPPED


async def test_a_kill_names_the_nodes_that_know_the_job() -> None:
    told = await control_over(n0=NodeRoad(None), n1=road(), n2=road()).kill("j")
    assert told == "job j was killed on n1 and n2"


async def test_a_kill_of_what_has_ended_returns_how_and_when_that_was() -> None:
    nodes = {f"n{number}": road(JobState.FAILED) for number in range(2)}
    for node in nodes.values():
        assert node.status is not None
        node.status = msgspec.structs.replace(node.status, state_s=37.0, age_s=60.0)
    told = await control_over(**nodes).kill("j")
    assert told == "job j failed before, 37 s ago"
    assert [node.kinds() for node in nodes.values()] == [["Kill"]] * 2


async def test_a_kill_of_what_no_node_knows_is_refused() -> None:
    with pytest.raises(AgentRefusedError, match="there is no job j"):
        await control_over(n0=NodeRoad(None), n1=NodeRoad(None)).kill("j")


async def test_a_stop_reaches_the_nodes_that_answer_and_says_that_others_do_not() -> None:
    silent, other = road(num_nodes=2), road(num_nodes=2)
    silent.answers[GetStatus] = unreachable("n0")
    told = await control_over(n0=silent, n1=other).stop("j", is_agreed=False)
    assert told == "job j was asked to end; only n1 of its 2 nodes could be asked"
    assert (other.kinds(), silent.heard) == (["Stop"], [])


@pytest.mark.parametrize(
    ("state", "age_s", "answer"),
    [
        (JobState.STOPPED, 60.0, "job j was stopped before, 1.0 s ago"),
        (JobState.FAILED, 60.0, "job j failed before, 1.0 s ago"),
        (JobState.SUCCEEDED, 60.0, "job j succeeded before, 1.0 s ago"),
        (JobState.LOST, None, "job j was lost before"),
    ],
)
async def test_a_stop_of_what_has_ended_answers_that_and_since_when(
    state: JobState, age_s: float | None, answer: str
) -> None:
    nodes = three_nodes(state)
    for node in nodes.values():
        node._become(age_s=age_s)
    first = next(iter(nodes.values()))
    first._become(state_s=9.0)  # the last node ends a job

    assert await control_over(**nodes).stop("j", is_agreed=True) == answer


@pytest.mark.parametrize(
    "detail", ["stopping by SIGTERM; what is left in 30 s is killed", "stopping after a step and a checkpoint"]
)
async def test_a_stop_reports_how_the_node_ends_the_job_whatever_was_asked(detail: str) -> None:
    node = road()
    stopping = job_status(job_id="j", state=JobState.STOPPING, attempt=0, num_nodes=1, detail=detail)

    def stop() -> Reply:
        node.status = stopping
        return Accepted()

    node.answers[Stop] = stop
    assert await control_over(n0=node).stop("j", is_agreed=True) == f"job j is {detail}"


async def test_a_job_that_only_a_silent_node_may_know_is_not_said_to_be_unknown() -> None:
    silent = road()
    silent.answers[GetStatus] = unreachable("n0")
    with pytest.raises(AgentUnreachableError, match="the agent on n0 does not answer"):
        await control_over(n0=silent, n1=NodeRoad(None)).stop("j", is_agreed=True)


async def test_a_job_goes_on_without_a_node_that_is_lost() -> None:
    silent, other = road(JobState.STOPPED, num_nodes=2), road(JobState.STOPPED, num_nodes=2)
    silent.answers[GetStatus] = unreachable("n0")
    control = control_over(n0=silent, n1=other)
    with pytest.raises(UsageError, match="only 1 of the 2 nodes of job j can be asked"):
        await control.restart("j")
    assert await control.restart("j", without=()) == "job j restarts with 2 ranks (restart 1)"
    assert (other.kinds(), silent.heard) == (["PrepareAgain", "Commit"], [])
    again = other.heard[0]
    assert isinstance(again, PrepareAgain)
    assert (again.num_nodes, again.node_rank, again.master_addr) == (1, 0, "127.0.0.1")


async def test_nodes_that_go_on_together_meet_at_an_address_of_the_first() -> None:
    channels = three_nodes()
    channels["n0"].answers[GetStatus] = unreachable("n0")
    fleet = Fleet(channels)
    addresses = {"n1": ["10.0.0.1/24"], "n2": ["10.0.0.2/24"]}
    control = JobControl(lambda: fleet, list(channels), lambda _sentence: None, AuditLog(None), addresses.__getitem__)
    assert await control.restart("j", is_immediate=True, without=())
    assert channels["n1"].kinds() == channels["n2"].kinds() == ["Kill", "PrepareAgain", "Commit"]
    again = channels["n2"].heard[1]
    assert isinstance(again, PrepareAgain)
    assert (again.num_nodes, again.node_rank, again.master_addr) == (2, 1, "10.0.0.1")


async def test_nodes_that_cannot_meet_are_not_ended_for_it() -> None:
    channels = three_nodes()
    del channels["n0"]
    with pytest.raises(UsageError, match="n1 has no address"):
        await control_over(**channels).restart("j", without=())
    assert channels["n1"].heard == channels["n2"].heard == []


async def test_nodes_whose_first_one_stays_meet_where_they_met() -> None:
    channels = three_nodes()
    assert await control_over(**channels).restart("j", is_immediate=True, without=("n1",))
    assert channels["n1"].heard == []
    assert channels["n0"].kinds() == channels["n2"].kinds() == ["Kill", "PrepareAgain", "Commit"]
    again = channels["n2"].heard[1]
    assert isinstance(again, PrepareAgain)
    assert (again.num_nodes, again.node_rank, again.master_addr) == (2, 1, None)


async def test_a_node_that_comes_back_meanwhile_does_not_take_part() -> None:
    channels = three_nodes()
    lost = channels["n0"]
    lost.answers[GetStatus] = unreachable("n0")
    fleet = Fleet(channels)
    control = JobControl(
        lambda: fleet, list(channels), lambda _sentence: None, AuditLog(None), lambda node: [f"10.0.0.{node[1]}/24"]
    )
    channels["n2"].gate.clear()
    restart = asyncio.create_task(control.restart("j", is_immediate=True, without=()))
    await until_async(lambda: "PrepareAgain" in channels["n2"].kinds(), 10, "the attempt to be prepared")
    del lost.answers[GetStatus]
    channels["n2"].gate.set()
    assert await restart == "job j restarts with 4 ranks (restart 1)"
    assert lost.heard == []


async def test_another_address_is_tried_where_one_leads_nowhere() -> None:
    channels = three_nodes(JobState.STOPPED)
    del channels["n0"]
    tried: list[str | None] = []

    def knock() -> Reply:
        again = channels["n2"].heard[-1]
        assert isinstance(again, PrepareAgain)
        tried.append(again.master_addr)
        if len(tried) == 2:
            del channels["n2"].answers[PrepareAgain]
        return Refused(RefusalReason.UNREACHABLE, "no way") if len(tried) == 1 else Accepted()

    channels["n2"].answers[PrepareAgain] = knock
    fleet = Fleet(channels)
    addresses = {"n1": ["10.0.0.1/24", "192.168.7.1/16"], "n2": ["10.0.0.2/24", "192.168.7.2/16"]}
    control = JobControl(lambda: fleet, list(channels), lambda _sentence: None, AuditLog(None), addresses.__getitem__)
    await control.restart("j", without=())
    assert tried == ["10.0.0.1", "192.168.7.1"]


async def test_no_node_is_left() -> None:
    with pytest.raises(UsageError, match="no node is left on which job j could go on"):
        await control_over(n0=road()).restart("j", without=("n0",))


def test_a_refusal_is_a_sentence_without_the_agent_s_own_code() -> None:
    error = AgentRefusedError("h1", "wrong_state", "job demo has ended")
    assert (str(error), error.reason) == ("h1 refused: job demo has ended", "wrong_state")
