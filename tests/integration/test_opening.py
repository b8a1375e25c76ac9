"""Ranks come together by every rendezvous, know their places, and may do it again."""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import ddpcore
from ddpcore.errors import DdpcoreError, GroupOpenError, UnequalRanksError
from ddpcore.placement import ALONE, current_placement
from ddpcore.process_group.equality import check_equal_everywhere
from ddpcore.process_group.machine import own_address, route_to
from ddpcore.process_group.open_group import open_process_group
from tests.support.gpus import NUM_GPUS
from tests.support.meeting import FREE, free_port, meeting_env
from tests.support.own_threads import thread_names
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks


def add_up(init_method: str | None, host: str | None = None) -> dict[str, Any]:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    if host is not None:
        # Another machine's name is all that tells its ranks apart here.
        host = host.split()[int(os.environ["RANK"])]
        socket.gethostname = lambda: host
    with open_process_group(init_method, timeout_s=60, join_timeout_s=60) as group:
        total = torch.ones(1)
        dist.all_reduce(total)
        ddpcore.barrier("middle", 60)
        placement = current_placement()
        assert placement == group.placement
    assert not dist.is_initialized()
    assert current_placement() == ALONE
    # A thread that has been joined may stand in the list a little longer.
    until(lambda: "pt_gloo_runloop" not in thread_names(), 60, "gloo's threads are gone")
    return {
        "total": total.item(),
        "placement": tuple(placement),
        "device": str(group.device),
        "backend": group.backend,
        "gloo": os.environ["GLOO_SOCKET_IFNAME"],
    }


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("how", ["env", "agent", "tcp", "file"])
def test_ranks_meet_by_every_rendezvous(how: str, world_size: int, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)

    told = run_ranks(add_up, world_size, init_method, env=env, has_group=False)

    assert [one["total"] for one in told] == [world_size] * world_size
    assert [one["placement"] for one in told] == [(rank, world_size, rank, world_size, 0) for rank in range(world_size)]
    assert {(one["device"], one["backend"], one["gloo"]) for one in told} == {("cpu", "gloo", "lo")}


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_the_master_may_have_a_name_or_an_ipv6_address(host: str) -> None:
    if route_to(host.strip("[]")) is None:
        pytest.skip("this machine has no IPv6")

    told = run_ranks(add_up, 2, f"tcp://{host}:{free_port()}", env=FREE, has_group=False)

    assert [(one["total"], one["gloo"]) for one in told] == [(2.0, "lo")] * 2


def test_nodes_are_those_of_the_launcher() -> None:
    told = run_ranks(add_up, 4, None, num_nodes=2, has_group=False)

    assert [one["placement"] for one in told] == [(0, 4, 0, 2, 0), (1, 4, 1, 2, 0), (2, 4, 0, 2, 1), (3, 4, 1, 2, 1)]


@pytest.mark.parametrize("how", ["tcp", "file"])
def test_without_a_launcher_nodes_are_found_by_their_hosts(how: str, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)

    with WarmRanks(add_up, 4, init_method, "b a b b", env=env, has_group=False) as ranks:
        outcomes = ranks.outcomes()

    assert [outcome.value["placement"] for outcome in outcomes] == [
        (0, 4, 0, 3, 0),
        (1, 4, 0, 1, 1),
        (2, 4, 1, 3, 0),
        (3, 4, 2, 3, 0),
    ]


def test_the_interface_is_the_one_on_the_way_to_the_master() -> None:
    address = own_address()
    route = route_to(address) if address else None
    if route is None:
        pytest.skip("this machine has no address but loopback")

    told = run_ranks(add_up, 2, f"tcp://{address}:{free_port()}", env=FREE, has_group=False)

    assert {one["gloo"] for one in told} == {route.interface}


def test_loopback_between_machines_is_left_for_the_way_to_the_peers() -> None:
    """Debian maps a host's own name to 127.0.1.1: rank 0 would take lo, and the others wait for it."""
    address = own_address()
    route = route_to(address) if address else None
    if route is None:
        pytest.skip("this machine has no address but loopback")

    told = run_ranks(add_up, 2, f"tcp://127.0.0.1:{free_port()}", "a b", env=FREE, has_group=False)

    assert {one["gloo"] for one in told} == {route.interface}


def test_what_the_user_has_set_stays_and_is_warned_of() -> None:
    env = {**FREE, "GLOO_SOCKET_IFNAME": "lo"}
    with WarmRanks(add_up, 2, f"tcp://127.0.0.1:{free_port()}", "a b", env=env, has_group=False) as ranks:
        outcomes = ranks.outcomes()

    for outcome in outcomes:
        assert outcome.value["gloo"] == "lo"
        assert "lo reaches only this machine, and the job's ranks are on 2" in outcome.log
        assert "GLOO_SOCKET_IFNAME=lo by the environment" in outcome.log


def open_again_and_again(init_method: str | None) -> list[float]:
    totals = []
    for number in range(3):
        with open_process_group(init_method, timeout_s=60, join_timeout_s=60):
            total = torch.tensor([float(number)])
            dist.all_reduce(total)
            totals.append(total.item())
            ddpcore.barrier("again", 60)
    return totals


@pytest.mark.parametrize("how", ["env", "agent", "tcp", "file"])
def test_a_closed_group_can_be_opened_again(how: str, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)

    assert run_ranks(open_again_and_again, 2, init_method, env=env, has_group=False) == [[0.0, 2.0, 4.0]] * 2


def open_and_wait_to_be_killed() -> None:
    with open_process_group(join_timeout_s=30):
        Path(f"open-{os.environ['RANK']}").touch()
        dist.barrier()
        dist.recv(torch.ones(1), src=1 - dist.get_rank())


def test_a_second_attempt_finds_the_store_of_the_first() -> None:
    """torchrun keeps its store over restarts, with everything in it: a dead rank's claim is no rival."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    env = {"MASTER_PORT": str(store.port)}
    for _ in range(2):
        with WarmRanks(open_and_wait_to_be_killed, 2, env=env, has_group=False) as ranks:
            ranks.wait_for_file("open-0")
            ranks.wait_for_file("open-1")

    told = run_ranks(add_up, 3, None, env=env, has_group=False)

    assert [one["total"] for one in told] == [3.0] * 3


def come_late(init_method: str) -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:
        # However long it takes until the last rank is started.
        Path("ready").touch()
        while not Path("go").exists():
            os.sched_yield()
    with open_process_group(init_method, join_timeout_s=60):
        return "open"


@pytest.mark.parametrize("how", ["tcp", "file"])
def test_ranks_may_start_one_after_the_other(how: str, tmp_path: Path) -> None:
    init_method, env = meeting_env(how, tmp_path)
    with WarmRanks(come_late, 3, init_method, env=env, has_group=False) as ranks:
        ranks.wait_for_file("ready")
        if how == "file":
            ranks.wait_for_file(str(tmp_path / "meet"))
        (ranks.directory / "go").touch()
        assert [outcome.value for outcome in ranks.outcomes()] == ["open"] * 3


def compare(facts: dict[int, dict[str, str]]) -> str:
    with open_process_group(join_timeout_s=30):
        mine = facts.get(dist.get_rank(), facts[0])
        try:
            check_equal_everywhere(mine, timeout_s=60)
        except UnequalRanksError as error:
            return "; ".join(error.differences)
        return "equal"


def test_the_program_s_own_facts_are_compared_too() -> None:
    same = {"data set": "1000 samples", "config": "crc32 0a1b"}
    other = {**same, "data set": "999 samples"}
    host = socket.gethostname()

    assert run_ranks(compare, 3, {0: same}, has_group=False) == ["equal"] * 3
    assert (
        run_ranks(compare, 3, {0: same, 2: other}, has_group=False)
        == [f"data set differs: 1000 samples on ranks 0-1 ({host}), 999 samples on rank 2 ({host})"] * 3
    )


def open_alone(variables: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *FREE):
        os.environ.pop(name, None)
    os.environ |= variables
    with open_process_group(**arguments) as group:
        ddpcore.barrier("alone")
        with open_process_group() as second:
            second.close()
        return {
            "placement": group.placement,
            "backend": group.backend,
            "device": str(group.device),
            "is_open": dist.is_initialized(),
        }


@pytest.mark.parametrize(("variables", "arguments"), [({}, {}), ({"MASTER_ADDR": "gpu1"}, {}), ({}, {"world_size": 1})])
def test_without_a_launcher_a_process_is_alone(variables: dict[str, str], arguments: dict[str, Any]) -> None:
    (told,) = run_ranks(open_alone, 1, variables, arguments, has_group=False)

    assert told == {"placement": ALONE, "backend": "", "device": "cpu", "is_open": False}


def ask_for_what_is_not_there(arguments: dict[str, Any]) -> str:
    try:
        open_process_group(join_timeout_s=5, **arguments)
    except DdpcoreError as error:
        return f"{type(error).__name__}: {error}"
    return "open"


@pytest.mark.skipif(NUM_GPUS > 0, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "nccl"}, "BackendMissingError: cuda is asked for, but this process sees no GPU"),
        ({"backend": "nccl", "device": "cpu"}, "ContradictoryLaunchError: backend nccl is for GPUs, and device is cpu"),
        ({"device": "cuda:0"}, "BackendMissingError: cuda is asked for"),
        ({"backend": "mpi"}, "BackendMissingError: backend 'mpi' is not in torch"),
        ({"backend": "smoke"}, "BackendMissingError: backend 'smoke' is not in torch"),
        ({"rank": 1, "world_size": 1}, "ContradictoryLaunchError: rank=1 was given, but the environment has RANK=0"),
    ],
)
def test_what_is_not_there_is_said_before_any_waiting(arguments: dict[str, Any], words: str) -> None:
    (told,) = run_ranks(ask_for_what_is_not_there, 1, arguments, has_group=False)

    assert words in told


def open_twice() -> str:
    try:
        open_process_group()
    except GroupOpenError as error:
        return str(error)
    return "open"


def test_a_group_that_is_open_already_is_not_opened_again() -> None:
    assert "a process group is open already" in run_ranks(open_twice, 1)[0]
