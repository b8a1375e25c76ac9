"""What goes wrong when ranks meet is one clear line on every rank that is there, soon, and never a hang."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddpcore.errors import DdpcoreError
from ddpcore.process_group import join_check
from ddpcore.process_group.open_group import open_process_group
from tests.support.meeting import FREE, free_port, meeting_env
from tests.support.waiting import until
from tests.support.warm_ranks import Outcome, WarmRanks, try_ranks

MEETINGS = ["agent", *(pytest.param(how, marks=pytest.mark.slow) for how in ("tcp", "file"))]
"""How ranks find each other."""
JOIN_S = 4.0
"""Where ranks do not come: longer than those that come are apart."""
LONG_JOIN_S = 60.0
"""Where all come."""
AT_ONCE_S = 30.0

Overrides = dict[int, dict[str, Any]]


def open_unless_absent(init_method: str | None, absent: list[int], join_s: float, overrides: Overrides) -> str:
    """Open a group, each rank with arguments and variables of its own; the absent ones stay away."""
    rank = int(os.environ["RANK"])
    if rank in absent:
        return "absent"
    # One that the machine is slow to start is none that does not come.
    Path(f"here-{rank}").touch()
    for other in set(range(int(os.environ["WORLD_SIZE"]))) - set(absent):
        until(Path(f"here-{other}").exists, 60, f"rank {other} is here")
    arguments = {"join_timeout_s": join_s, "timeout_s": 30.0, **overrides.get(rank, {})}
    os.environ |= arguments.pop("env", {})
    sys.argv += arguments.pop("argv", [])
    join_check.NEWS_S = (0.3, 60.0)
    began_s = time.monotonic()
    try:
        with open_process_group(init_method, **arguments):
            return "open"
    finally:
        assert time.monotonic() - began_s < AT_ONCE_S


def meet(
    world_size: int,
    init_method: str | None = None,
    *,
    absent: list[int] | None = None,
    join_s: float = LONG_JOIN_S,
    overrides: Overrides | None = None,
    env: dict[str, str],
) -> list[Outcome]:
    return list(
        try_ranks(
            open_unless_absent,
            world_size,
            init_method,
            absent or [],
            join_s,
            overrides or {},
            env=env,
            has_group=False,
        )
    )


def kind_of(outcome: Outcome) -> str:
    return outcome.error_type.rpartition(".")[2]


@pytest.mark.parametrize("how", MEETINGS)
def test_every_rank_that_came_names_those_that_did_not(how: str, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)

    outcomes = meet(4, init_method, absent=[2, 3], join_s=JOIN_S, env=env)

    for outcome in outcomes[:2]:
        assert kind_of(outcome) == "RanksMissingError", outcome
        assert "ranks 2-3 of 4 have not come to" in outcome.error
        assert re.search(r"in 4 s; rank 0 \(pid \d+ on \S+\), rank 1 \(pid \d+ on \S+\) are there", outcome.error)
        assert "\n" not in outcome.error
    assert [outcome.value for outcome in outcomes[2:]] == ["absent", "absent"]
    # Rank 1 may have come after rank 0 said so.
    assert re.search(r"rank 0 waits at .* for ranks (2-3|1-3), for \d+ s now", outcomes[0].log)
    assert " waits at " not in outcomes[1].log


def test_a_missing_rank_0_is_a_store_that_nobody_hosts() -> None:
    port = free_port()

    outcomes = meet(3, f"tcp://127.0.0.1:{port}", absent=[0], join_s=JOIN_S, env=FREE)

    for outcome in outcomes[1:]:
        assert kind_of(outcome) == "MasterUnreachableError"
        assert f"has not reached rank 0's store at tcp://127.0.0.1:{port} in 4 s" in outcome.error
        assert f"nobody listens on port {port} of 127.0.0.1" in outcome.error


def test_a_missing_rank_0_is_named_where_the_store_is_not_its_own(tmp_path: Path) -> None:
    outcomes = meet(2, f"file://{tmp_path}/meet", absent=[0], join_s=JOIN_S, env=FREE)

    assert "rank 0 of 2 has not come to" in outcomes[1].error


@pytest.mark.parametrize(
    ("how", "odd_one"),
    [("agent", 0), *(pytest.param(*other, marks=pytest.mark.slow) for other in (("tcp", 0), ("tcp", 3), ("file", 3)))],
)
def test_different_world_sizes_are_named_on_every_rank(how: str, odd_one: int, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)
    world_size = {0: 3, 3: 5}[odd_one]

    outcomes = meet(
        4, init_method, overrides={odd_one: {"env": {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": ""}}}, env=env
    )

    for outcome in outcomes:
        assert kind_of(outcome) == "ContradictoryLaunchError", outcome
        assert f"in a world of {world_size}" in outcome.error
        assert "in a world of 4" in outcome.error


@pytest.mark.parametrize("how", MEETINGS)
def test_two_processes_with_one_rank_are_named_on_every_rank(how: str, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)

    outcomes = meet(3, init_method, overrides={2: {"env": {"RANK": "1", "LOCAL_RANK": "1"}}}, env=env)

    assert {kind_of(outcome) for outcome in outcomes} == {"ContradictoryLaunchError"}
    assert all("two processes claim rank 1" in outcome.error for outcome in outcomes), outcomes


def test_a_second_rank_0_finds_its_port_taken() -> None:
    port = free_port()

    outcomes = meet(3, f"tcp://127.0.0.1:{port}", join_s=JOIN_S, overrides={2: {"env": {"RANK": "0"}}}, env=FREE)

    (loser,) = (outcome for outcome in outcomes if kind_of(outcome) == "PortInUseError")
    assert re.search(rf"cannot listen on port {port} of \S+, where pid \d+ \(.*rank_template", loser.error)
    assert sorted(kind_of(outcome) for outcome in outcomes) == [
        "PortInUseError",
        "RanksMissingError",
        "RanksMissingError",
    ]


def test_an_occupied_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        first, second = meet(2, f"tcp://127.0.0.1:{port}", join_s=JOIN_S, env=FREE)

    assert kind_of(first) == "PortInUseError"
    assert f"where pid {os.getpid()} (" in first.error
    assert kind_of(second) == "MasterUnreachableError"
    assert f"what listens on port {port} of 127.0.0.1 is no torch store: pid {os.getpid()} (" in second.error


def test_a_master_whose_name_does_not_resolve_is_said_so() -> None:
    outcomes = meet(2, "tcp://no-such-host.invalid:4711", join_s=JOIN_S, env=FREE)

    assert all("no-such-host.invalid does not resolve on" in outcome.error for outcome in outcomes)
    assert "is not an address of" in outcomes[0].error


def test_different_backends_are_refused_before_they_hang() -> None:
    outcomes = meet(2, overrides={1: {"backend": "cpu:gloo"}}, env={})

    for outcome in outcomes:
        assert "the ranks would use different backends; backend differs: gloo on rank 0" in outcome.error


def test_two_local_ranks_of_one_number_are_refused() -> None:
    outcomes = meet(2, overrides={1: {"env": {"LOCAL_RANK": "0"}}}, env={})

    for outcome in outcomes:
        assert re.search(r"rank 0 \(.*\) and rank 1 \(.*\) both have LOCAL_RANK=0", outcome.error)


def test_what_changes_the_collectives_must_be_set_everywhere() -> None:
    outcomes = meet(2, overrides={1: {"env": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}}, env={})

    for outcome in outcomes:
        assert kind_of(outcome) == "UnequalRanksError"
        assert "TORCH_DISTRIBUTED_DEBUG differs: nothing on rank 0" in outcome.error
        assert "DETAIL on rank 1" in outcome.error


def test_different_arguments_are_only_told() -> None:
    told = "the ranks are not quite equal: the command line differs"

    outcomes = meet(2, overrides={0: {"argv": ["--lr", "0.1"]}, 1: {"argv": ["--lr", "0.2"]}}, env={})

    for outcome in outcomes:
        assert outcome.value == "open"
        assert told in outcome.log


def test_the_own_rank_among_the_arguments_is_no_difference() -> None:
    outcomes = meet(2, overrides={0: {"argv": ["--local-rank=0"]}, 1: {"argv": ["--local-rank=1"]}}, env={})

    assert [(outcome.value, "equal" in outcome.log) for outcome in outcomes] == [("open", False)] * 2


def test_an_error_of_one_rank_on_the_way_is_told_to_all() -> None:
    overrides: Overrides = {1: {"env": {"GLOO_SOCKET_IFNAME": "nope0"}}}

    outcomes = meet(2, overrides=overrides, env={})

    assert kind_of(outcomes[1]) == "InterfaceError"
    assert "GLOO_SOCKET_IFNAME=nope0: this machine has no interface 'nope0'" in outcomes[1].error
    assert "rank 1 (pid " in outcomes[0].error
    assert "cannot take part: GLOO_SOCKET_IFNAME=nope0" in outcomes[0].error


def open_and_stay(init_method: str, absent: list[int]) -> None:
    rank = int(os.environ["RANK"])
    if rank not in absent:
        Path(f"joining-{rank}").touch()
        open_process_group(init_method, join_timeout_s=60)
        Path(f"open-{rank}").touch()
    time.sleep(60)


def leave_file_behind(init_method: str, world_size: int, absent: list[int]) -> None:
    """Let a run be killed while it is open, or while it waits for those that are absent."""
    with WarmRanks(open_and_stay, world_size, init_method, absent, env=FREE, has_group=False) as ranks:
        for rank in range(world_size):
            if rank not in absent:
                ranks.wait_for_file(f"{'joining' if absent else 'open'}-{rank}")
        if absent:
            path = Path(init_method.removeprefix("file://"))
            until(lambda: path.exists() and b"/arrived" in path.read_bytes(), 60, "a rank has come")
        for rank in range(world_size):
            ranks.kill(rank)


@pytest.mark.parametrize("absent", [[], pytest.param([0], marks=pytest.mark.slow), [1, 2]])
def test_the_file_of_a_killed_run_is_named_on_every_rank(absent: list[int], tmp_path: Path) -> None:
    path = tmp_path / "meet"
    leave_file_behind(f"file://{path}", 3, absent)

    outcomes = meet(3, f"file://{path}", env=FREE)

    for outcome in outcomes:
        assert kind_of(outcome) == "StaleRendezvousError", outcome
        assert f"file://{path} was left behind by a run that has been killed: rank " in outcome.error
        assert f"Remove it (rm {path}) and start all ranks again" in outcome.error
    path.unlink()
    assert [outcome.value for outcome in meet(3, f"file://{path}", env=FREE)] == ["open"] * 3


def test_the_file_of_a_run_that_was_closed_is_used_again(tmp_path: Path) -> None:
    for world_size in (2, 3, 2):
        assert [one.value for one in meet(world_size, f"file://{tmp_path}/meet", env=FREE)] == ["open"] * world_size


def test_the_file_of_a_run_that_never_began_is_used_again(tmp_path: Path) -> None:
    refused = meet(2, f"file://{tmp_path}/meet", overrides={1: {"backend": "cpu:gloo"}}, env=FREE)

    assert {kind_of(outcome) for outcome in refused} == {"ContradictoryLaunchError"}
    assert [outcome.value for outcome in meet(2, f"file://{tmp_path}/meet", env=FREE)] == ["open"] * 2


def wait_for_a_removed_file(init_method: str) -> str:
    if os.environ["RANK"] == "0":
        return "absent"
    try:
        open_process_group(init_method, join_timeout_s=60)
    except DdpcoreError as error:
        return str(error)
    return "open"


def test_a_file_removed_under_waiting_ranks_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    with WarmRanks(wait_for_a_removed_file, 2, f"file://{path}", env=FREE, has_group=False) as ranks:
        until(lambda: path.exists() and b"/arrived" in path.read_bytes(), 60, "rank 1 has come")
        path.unlink()
        assert "has been removed while ranks were joining" in ranks.outcomes()[1].value


def remove_the_file_before_it_is_read(init_method: str) -> str:
    if os.environ["RANK"] == "0":
        return "absent"
    is_set = join_check.VerdictBoard.is_set

    def remove_and_read(board: join_check.VerdictBoard, number: int) -> bool:
        Path(init_method.removeprefix("file://")).unlink(missing_ok=True)
        return is_set(board, number)

    join_check.VerdictBoard.is_set = remove_and_read  # type: ignore[assignment]
    try:
        open_process_group(init_method, join_timeout_s=3)
    except DdpcoreError as error:
        return str(error)
    return "open"


def test_a_file_removed_between_a_look_and_a_read_is_said_so_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    outcomes = [*try_ranks(remove_the_file_before_it_is_read, 2, url, env=FREE, has_group=False)]

    assert "has been removed while ranks were joining" in outcomes[1].value


def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")

    outcomes = meet(2, f"file://{path}", env=FREE)

    assert all("exists and is no rendezvous file" in outcome.error for outcome in outcomes)
    assert path.read_text() == "print('hello')\n"
