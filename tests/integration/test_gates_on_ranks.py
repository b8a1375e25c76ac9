"""Named gates between real ranks: who waits learns who is missing, where, and at once if nobody can ever come.

Connecting to a TCPStore resolves names, which takes 5 s now and then where DNS does not answer: bounds are generous.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpcore.barriers import barrier_session, named_barriers, open_session
from ddpcore.barriers.arrivals import go_key
from ddpcore.barriers.rank_status import BarrierKind
from ddpcore.errors import BarrierDeadlockError, BarrierTimeoutError, DdpcoreError
from tests.support.hearts import told_function
from tests.support.meeting import free_port
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).name
AT_ONCE_S = 30.0
"""Below the time-outs of 60 s and more that these programs give; on an idle machine it is two seconds."""


FEW_KEYS = 8
"""Of the last gate, and what a rank may tell once; 1,000 gates have thousands."""


def failure(call: Callable[[], object]) -> tuple[str, str, float]:
    """Return what a call raises, and after how many seconds."""
    began_s = time.monotonic()
    try:
        call()
    except (RuntimeError, DdpcoreError) as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    return "", "", time.monotonic() - began_s


def linger_for(name: str, telling: str = "") -> None:
    """Stay here until a file is there; make the one to tell by once the others have heard that this rank is here."""
    while not Path(name).exists():
        if telling and told_function() == "linger_for":
            Path(telling).touch()
            telling = ""
        time.sleep(0.01)


# Row S2: what a barrier is.


def arrive_early_or_at_the_end() -> float:
    """Rank 1 calls the barrier first thing, rank 0 at its end; when each has passed its last line before and after."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
        before_s = time.monotonic()
        named_barriers.barrier("only one")
        return before_s
    named_barriers.barrier("only one")
    return time.monotonic()


def test_rank_1_goes_on_only_when_rank_0_has_come_to_its_end() -> None:
    last_line_of_0_s, first_line_of_1_s = run_ranks(arrive_early_or_at_the_end, 2)

    assert first_line_of_1_s >= last_line_of_0_s


def pass_two(first_s: float) -> list[tuple[float, float]]:
    """Return when this rank came to each of two gates and when it had passed: all ranks have one clock."""
    named_barriers.barrier("start")
    times_s = []
    for number, label in enumerate(("first", "second")):
        if dist.get_rank() != number:
            time.sleep(first_s)
        came_s = time.monotonic()
        named_barriers.barrier(label)
        times_s.append((came_s, time.monotonic()))
    return times_s


def test_the_last_to_come_sets_the_time_for_all() -> None:
    for gate in zip(*run_ranks(pass_two, 2, 0.6), strict=True):
        last_s = max(came_s for came_s, _ in gate)
        for _, passed_s in gate:
            assert last_s <= passed_s < last_s + AT_ONCE_S


def call_once_or_twice() -> tuple[str, str, float]:
    named_barriers.barrier("epoch")
    if dist.get_rank() == 1:
        named_barriers.leave()
        for rank in (0, 2):
            linger_for(f"told-{rank}")
        return "", "", 0.0
    told = failure(lambda: named_barriers.barrier("epoch"))
    Path(f"told-{dist.get_rank()}").touch()
    return told


def test_a_rank_that_has_left_after_fewer_calls_is_an_error_at_once_with_counts_and_lines_of_both_sides() -> None:
    outcomes = run_ranks(call_once_or_twice, 3)

    for kind, message, after_s in (outcomes[0], outcomes[2]):
        assert kind == "BarrierDeadlockError"
        fate = f"rank 1 has ended after 1 call of barrier 'epoch' (the last at {HERE}:"
        assert message.startswith(f"barrier 'epoch' can never be passed: {fate}")
        assert "in call_once_or_twice); rank 0 waits in its 2nd call of barrier 'epoch' at " in message
        assert after_s < AT_ONCE_S


# Who is missing, and where.


def wait_for_two_that_do_not_come() -> tuple[str, str, list[int]]:
    named_barriers.barrier("start")
    rank = dist.get_rank()
    if rank >= 2:
        linger_for("never", telling=f"missing-{rank}")
    linger_for("go")
    try:
        # Longer than the two that come are apart.
        named_barriers.barrier("epoch", timeout_s=6.0)
    except BarrierTimeoutError as error:
        return type(error).__name__, str(error), error.missing
    return "", "", []


def test_every_survivor_names_all_missing_ranks_with_their_lines() -> None:
    with WarmRanks(wait_for_two_that_do_not_come, 4) as ranks:
        for rank in (2, 3):
            ranks.wait_for_file(f"missing-{rank}")
        ranks.kill(3, signal.SIGSTOP)
        (ranks.directory / "go").touch()
        ends = [ranks.status(rank) for rank in (0, 1)]
        ranks.kill(2)
        ranks.kill(3)
        outcomes = ranks.outcomes()

    assert ends == [0, 0]
    for outcome in outcomes[:2]:
        kind, message, missing = outcome.value
        assert (kind, missing) == ("BarrierTimeoutError", [2, 3])
        assert message.startswith("ranks 2-3 did not reach barrier 'epoch' in 6 s: rank 2 is alive at ")
        assert f"rank 2 is alive at {HERE}:" in message
        assert (
            "in linger_for, without a call of barrier 'epoch' (its last barrier: barrier 'start', 1st call at"
            in message
        )
        assert (
            f"rank 3 is stopped (SIGSTOP; pid {ranks.pids[3]} on {socket.gethostname()}), last seen at {HERE}:"
            in message
        )


def wait_for_one_that_dies() -> tuple[str, str, float]:
    named_barriers.barrier("start")
    if dist.get_rank() == 1:
        linger_for("never", telling="ready")
    return failure(lambda: named_barriers.barrier("epoch"))


def test_a_killed_rank_is_an_error_within_seconds() -> None:
    with WarmRanks(wait_for_one_that_dies, 3) as ranks:
        ranks.wait_for_file("ready")
        ranks.kill(1)
        outcomes = ranks.outcomes()

    for rank in (0, 2):
        kind, message, after_s = outcomes[rank].value
        assert kind == "BarrierDeadlockError"
        assert f"rank 1 has died, last seen at {HERE}:" in message
        assert after_s < AT_ONCE_S


# What can never end, and what only looks like it.


def wait_for_each_other() -> tuple[str, str, float]:
    named_barriers.barrier("start")
    return failure(lambda: named_barriers.barrier("left" if dist.get_rank() == 0 else "right"))


def test_ranks_that_wait_for_each_other_both_get_both_sites_at_once() -> None:
    for rank, (kind, message, after_s) in enumerate(run_ranks(wait_for_each_other, 2)):
        mine, other = ("left", "right") if rank == 0 else ("right", "left")
        assert kind == "BarrierDeadlockError"
        site = f"rank {1 - rank} waits in its 1st call of barrier '{other}' at {HERE}:"
        assert message.startswith(f"barrier '{mine}' can never be passed: {site}")
        assert f"; rank {rank} waits in its 1st call of barrier '{mine}' at {HERE}:" in message
        assert after_s < AT_ONCE_S


def give_up_one_and_meet_at_the_other() -> str:
    named_barriers.barrier("start")
    told = ""
    if dist.get_rank() == 0:
        try:
            named_barriers.barrier("only rank 0", timeout_s=20.0)
        except BarrierDeadlockError:
            told = "given up"
    named_barriers.barrier("both", timeout_s=60.0)
    return told


def test_only_the_shorter_of_two_waits_is_given_up_and_the_ranks_meet_at_the_other() -> None:
    assert run_ranks(give_up_one_and_meet_at_the_other, 2) == ["given up", ""]


def be_slow(for_s: float) -> bool:
    named_barriers.barrier("start")
    if dist.get_rank() == 1:
        time.sleep(for_s)
    named_barriers.exchange("a", "x")
    if dist.get_rank() == 0:
        time.sleep(for_s)
    named_barriers.barrier("b")
    return True


def test_slow_ranks_are_waited_for() -> None:
    assert run_ranks(be_slow, 2, 2.0) == [True, True]


def meet_in_two_threads() -> bool:
    """Rank 0 comes to one gate in its main thread and, late, to another beside it; rank 1's main thread to both."""
    named_barriers.barrier("start")
    if dist.get_rank() == 0:
        thread = threading.Thread(target=come_beside)
        thread.start()
        session = open_session.current_session()
        assert session is not None
        until(lambda: session.journal.num_threads > 1, 60, "the other thread is known to come to gates")
        named_barriers.barrier("main")
        thread.join()
    else:
        for _ in range(2):
            named_barriers.barrier("beside")
        named_barriers.barrier("main")
    return True


def come_beside() -> None:
    named_barriers.barrier("beside")
    time.sleep(2.5)
    named_barriers.barrier("beside")


def test_main_threads_at_different_gates_are_no_deadlock_while_another_thread_may_come() -> None:
    assert run_ranks(meet_in_two_threads, 2) == [True, True]


def wait_beside_a_collective() -> tuple[str, str, float]:
    named_barriers.barrier("start")
    if dist.get_rank() == 1:
        return failure(lambda: dist.all_reduce(torch.ones(1)))
    return failure(lambda: named_barriers.barrier("epoch"))


def test_a_rank_in_a_collective_that_needs_this_one_is_an_error_at_once() -> None:
    (kind, message, after_s), (other_kind, _, _) = run_ranks(wait_beside_a_collective, 2)

    assert kind == "BarrierDeadlockError"
    assert f"rank 1 waits in all_reduce #1 of group 0 at {HERE}:" in message
    assert after_s < AT_ONCE_S
    assert other_kind == "RuntimeError"


def come_and_stop_before_saying_so() -> tuple[str, str, float]:
    named_barriers.barrier("start")
    if dist.get_rank() == 0:
        return failure(lambda: named_barriers.barrier("epoch"))
    session = open_session.current_session()
    assert session is not None
    gate = session.journal.calls(BarrierKind.BARRIER, "epoch").enter(time.monotonic(), 60.0)
    store = session.connection().store
    until(lambda: list(session.arrival_counter.missing(store, gate.key)) == [1], 60, "the other rank waits")
    session.arrival_counter.arrive(store, gate.key)
    until(lambda: store.check([go_key(gate.key)]), 60, "the other rank decides")
    return "", "", 0.0


def test_a_last_rank_that_is_stopped_before_it_can_release_the_others_does_not_hold_them() -> None:
    kind, _, after_s = run_ranks(come_and_stop_before_saying_so, 2)[0]

    assert kind == ""
    assert after_s < AT_ONCE_S


# The store, children, and many calls.


def lose_the_store(port: int) -> tuple[str, str, float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    named_barriers.barrier("start")
    if rank == 0:
        linger_for("never")
    # By the rank that stays: the other's host of the store may be killed only when this one has passed the start.
    Path("ready").touch()
    return failure(lambda: named_barriers.barrier("epoch"))


def test_the_end_of_the_store_s_host_is_told_at_once() -> None:
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    with WarmRanks(lose_the_store, 2, free_port(), has_group=False, env=environment) as ranks:
        ranks.wait_for_file("ready")
        ranks.kill(0)
        kind, message, after_s = ranks.outcomes()[1].value

    assert kind == "StoreLostError"
    assert "the job's store does not answer at barrier 'epoch'" in message
    assert after_s < AT_ONCE_S


def call_in_a_child() -> str:
    named_barriers.barrier("start")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, failure(lambda: named_barriers.barrier("child"))[1].encode())
        os._exit(0)
    os.waitpid(pid, 0)
    named_barriers.barrier("end")
    return os.read(read_end, 4096).decode()


def test_a_forked_child_is_told_that_it_is_no_rank_and_the_rank_goes_on() -> None:
    for rank, message in enumerate(run_ranks(call_in_a_child, 2)):
        assert f"is a forked child (of a DataLoader?) of rank {rank}: only the process that has opened" in message


def pass_many(num_calls: int) -> int:
    """Return how many keys more there are than after one gate, once the hearts have deleted what they can."""
    named_barriers.barrier("start")
    store = barrier_session.default_store()
    before = store.num_keys()
    for number in range(num_calls):
        named_barriers.barrier(f"step {number}")
        named_barriers.exchange("value", str(number))
    named_barriers.barrier("passed")
    # Nobody leaves before all have seen it: who has left deletes nothing any more.
    until(lambda: store.num_keys() <= before + FEW_KEYS, 60, "the keys of all gates but the last are deleted")
    return store.num_keys() - before


def test_many_gates_do_not_make_the_store_grow() -> None:
    assert max(run_ranks(pass_many, 2, 1000)) <= FEW_KEYS
