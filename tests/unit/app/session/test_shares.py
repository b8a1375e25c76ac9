"""Which ranks each node gets."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.commands import PrepareAgain, decode_command, encode_command
from agent.wire.jobs import JobState, JobStatus
from agent.wire.logs import RootCause
from app.errors import UsageError
from app.session.remote_job import end_states, even_split, has_loss_pattern, next_attempt, started_text
from tests.support.jobs import make_spec


def status(node_rank: int, share: int, first_rank: int, world_size: int, **changes: object) -> JobStatus:
    plain = JobStatus(
        job_id="gpt",
        attempt=3,
        state=JobState.STOPPED,
        state_s=1.0,
        world_size=world_size,
        num_nodes=2,
        node_rank=node_rank,
        first_rank=first_rank,
        local_world_size=share,
    )
    return msgspec.structs.replace(plain, **changes)


def two_nodes(**changes: object) -> dict[str, JobStatus]:
    """Return a job of three ranks on `a` and one on `b`, which comes first; the changes are b's."""
    return {"b": status(1, 1, 3, 4, **changes), "a": status(0, 3, 0, 4)}


@pytest.mark.parametrize(
    ("attempt", "num_ranks", "text"),
    [
        (0, 1, "job train started on gpu1 with 1 rank"),
        (1, 4, "job train started on gpu1 with 4 ranks (restart 1: a job of this name ran there before)"),
    ],
)
def test_a_name_that_is_used_again_is_explained_with_its_attempt(attempt: int, num_ranks: int, text: str) -> None:
    assert started_text(make_spec(attempt=attempt, world_size=num_ranks), "gpu1") == text


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_shares_are_as_even_as_can_be_and_leave_no_rank_out(num_ranks: int, num_nodes: int) -> None:
    local_sizes = even_split(num_ranks, num_nodes)
    assert len(local_sizes) == num_nodes
    assert sum(local_sizes) == num_ranks
    assert max(local_sizes) - min(local_sizes) <= 1
    assert local_sizes == sorted(local_sizes, reverse=True)


def test_every_node_keeps_its_ranks_in_the_next_attempt() -> None:
    commands = next_attempt(two_nodes(), None)
    assert list(commands) == ["a", "b"], "the node that chooses the port comes first"
    assert commands["a"] == PrepareAgain("gpt", 4, 0, 3, 4)
    assert commands["b"] == PrepareAgain("gpt", 4, 3, 1, 4)
    assert decode_command(encode_command(commands["b"])) == commands["b"]


def test_other_ranks_are_spread_evenly() -> None:
    assert list(next_attempt(two_nodes(), 5).values()) == [
        PrepareAgain("gpt", 4, 0, 3, 5),
        PrepareAgain("gpt", 4, 3, 2, 5),
    ]


def test_as_many_ranks_as_the_agents_take_can_be_asked_for() -> None:
    for command in next_attempt(two_nodes(), 8192).values():
        assert decode_command(encode_command(command)) == command


def test_the_next_attempt_is_above_that_of_every_node() -> None:
    commands = next_attempt(two_nodes(attempt=7), None, "10.0.0.1")
    assert {command.attempt for command in commands.values()} == {8}


@pytest.mark.parametrize(
    ("statuses", "num_ranks", "words"),
    [
        (two_nodes(state=JobState.STOPPING), None, "job gpt has not ended"),
        ({"a": status(0, 3, 0, 4)}, None, "only 1 of the 2 nodes of job gpt can be asked"),
        (two_nodes(), 1, "runs on 2 nodes: 1 rank is too few"),
        (two_nodes(), 8193, "runs on 2 nodes: 8193 ranks are too many"),
    ],
)
def test_what_cannot_begin_again_is_refused(statuses: dict[str, JobStatus], num_ranks: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        next_attempt(statuses, num_ranks)


def test_an_attempt_on_the_nodes_that_are_left_is_numbered_anew_and_meets_elsewhere() -> None:
    left = {"c": status(2, 3, 4, 7, num_nodes=3), "b": status(1, 2, 2, 7, num_nodes=3)}

    commands = next_attempt(left, None, "10.0.0.2")

    shape = {node: (one.node_rank, one.first_rank, one.local_world_size) for node, one in commands.items()}
    assert shape == {"b": (0, 0, 2), "c": (1, 2, 3)}
    assert list(commands) == ["b", "c"]
    assert {(one.num_nodes, one.world_size, one.master_addr, one.master_port) for one in commands.values()} == {
        (2, 5, "10.0.0.2", 0)
    }


def test_a_node_that_was_left_out_of_the_last_attempt_is_left_out_of_the_next_unless_it_is_wanted() -> None:
    last = {node: status(rank, 2, 2 * rank, 4, attempt=4) for rank, node in enumerate("ab")}
    old = status(0, 2, 0, 4)

    assert list(next_attempt({"old": old, **last}, None)) == ["a", "b"]
    wanted = next_attempt({**last, "old": old}, None, "10.0.0.2")
    assert {one.num_nodes for one in wanted.values()} == {3}
    assert set(wanted) == {"a", "b", "old"}


VICTIM, CULPRIT = RootCause(3, is_consequence=True), RootCause(3)


@pytest.mark.parametrize(
    ("cause", "failed_s", "expected"),
    [
        (VICTIM, 0.5, JobState.STOPPED),
        (VICTIM, 30.0, JobState.STOPPED),
        (VICTIM, 60.0, JobState.FAILED),
        (CULPRIT, 0.5, JobState.FAILED),
        (None, 0.5, JobState.FAILED),
    ],
)
def test_a_node_whose_ranks_lost_their_stopped_peers_was_stopped(
    cause: RootCause | None, failed_s: float, expected: JobState
) -> None:
    nodes = two_nodes(state=JobState.FAILED, state_s=failed_s, root_cause=cause)

    assert end_states(nodes) == {"b": expected, "a": JobState.STOPPED}
    assert end_states({"b": nodes["b"]}) == {"b": JobState.FAILED}


@pytest.mark.parametrize(
    ("patterns", "has_loss"),
    [
        ((), False),
        (("loss=([0-9.]+)",), True),
        (("(?P<loss>[0-9.]+)",), True),
        (("acc (?P<acc>[0-9.]+)",), False),
        (("acc (?P<acc>[0-9.]+)", "nll (?:=|:)([0-9.]+)"), True),
        ((r"step (?P<step>[0-9]+) \(loss ([0-9.]+)",), True),
    ],
)
def test_a_pattern_finds_the_loss_by_its_name_or_without_any(patterns: tuple[str, ...], has_loss: bool) -> None:
    assert has_loss_pattern(patterns) == has_loss
