"""Blocks that one rank runs first, between real ranks: what it raises, how it dies, where it hangs, all is told."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ddpcore import barriers
from ddpcore.barriers import heartbeat
from ddpcore.errors import DdpcoreError
from tests.support.hearts import told_function
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).name
AT_ONCE_S = 30.0
"""See test_gates_on_ranks.py."""


def failure(call: Callable[[], object]) -> tuple[str, str, str, float]:
    """Return the type, message and notes of what a call raises, and after how many seconds."""
    began_s = time.monotonic()
    try:
        call()
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - whatever it is, the test looks at it
        notes = "".join(getattr(error, "__notes__", ()))
        return type(error).__name__, str(error), notes, time.monotonic() - began_s
    return "", "", "", time.monotonic() - began_s


def fail(error: BaseException) -> None:
    raise error


# Who goes first, and what the others see of it.


def cache_once() -> tuple[list[bool], list[str]]:
    """Work as the texts have it: the first one fills the cache, the others find it there."""
    barriers.barrier("start")
    firsts, found = [], []
    node = os.environ["GROUP_RANK"]
    for number in range(3):
        cache = Path(f"cache-{node}-{number}")
        with barriers.local_master_first("cache") as is_first:
            firsts.append(is_first)
            if not cache.exists():
                time.sleep(0.1)
                cache.write_text(os.environ["RANK"])
            found.append(cache.read_text())
    return firsts, found


def test_the_first_rank_of_each_node_prepares_and_the_others_find_it_done() -> None:
    firsts, found = zip(*run_ranks(cache_once, 4, num_nodes=2), strict=True)

    assert firsts == ([True] * 3, [False] * 3, [True] * 3, [False] * 3)
    assert found == (["0"] * 3, ["0"] * 3, ["2"] * 3, ["2"] * 3)


def nest() -> list[bool]:
    seen = []
    for _ in range(3):
        with barriers.master_first() as outer, barriers.local_master_first("x") as inner:
            seen += [outer, inner]
            with barriers.master_first("y") as innermost:
                seen.append(innermost)
    with barriers.master_first("x") as of_job:
        seen.append(of_job)
    barriers.barrier("end")
    return seen


def test_blocks_nest_and_repeat_and_of_the_job_and_of_nodes_are_apart() -> None:
    assert run_ranks(nest, 4, num_nodes=2) == [
        [True] * 10,
        [False] * 10,
        [False, True, False] * 3 + [False],
        [False] * 10,
    ]


# It raises.


def raise_first(kind: str) -> tuple[str, str, str, float]:
    barriers.barrier("start")

    def prepare() -> None:
        with barriers.master_first("corpus") as is_first:
            if is_first:
                time.sleep(0.2)
                fail({"os": OSError("disk full: /data"), "ctrl-c": KeyboardInterrupt(), "exit": SystemExit(3)}[kind])
            raise AssertionError("a follower must not run the block")

    return failure(prepare)


def test_what_the_master_raises_the_others_raise_at_once_with_type_message_and_traceback() -> None:
    master, *others = run_ranks(raise_first, 3, "os")

    assert master[:2] == ("OSError", "disk full: /data")
    for kind, message, notes, after_s in others:
        assert (kind, message) == ("MasterFailedError", "rank 0 failed in first 'corpus': OSError: disk full: /data")
        assert notes.startswith("on rank 0:\nTraceback (most recent call last):")
        assert f'{HERE}", line' in notes
        assert notes.endswith("OSError: disk full: /data")
        assert after_s < AT_ONCE_S


def test_an_interrupt_and_an_exit_in_the_block_are_told_too() -> None:
    assert [end[:2] for end in run_ranks(raise_first, 2, "ctrl-c")] == [
        ("KeyboardInterrupt", ""),
        ("MasterFailedError", "rank 0 failed in first 'corpus': KeyboardInterrupt: "),
    ]
    assert [end[:2] for end in run_ranks(raise_first, 2, "exit")] == [
        ("SystemExit", "3"),
        ("MasterFailedError", "rank 0 failed in first 'corpus': SystemExit: 3"),
    ]


def try_again() -> list[str]:
    barriers.barrier("start")
    ends = []
    for attempt in range(3):
        try:
            with barriers.master_first("corpus") as is_first:
                if is_first and attempt < 2:
                    fail(OSError(f"attempt {attempt}"))
                ends.append("done")
        except (OSError, DdpcoreError) as error:
            ends.append(str(error).rpartition(": ")[2])
    return ends


def test_a_block_that_failed_can_be_tried_again_by_all() -> None:
    assert run_ranks(try_again, 3) == [["attempt 0", "attempt 1", "done"]] * 3


def fail_behind_the_master() -> str:
    barriers.barrier("start")
    try:
        with barriers.master_first("corpus") as is_first:
            if dist.get_rank() == 1:
                fail(ValueError("only here"))
    except ValueError as error:
        return str(error)
    return "master" if is_first else "follower"


def test_a_follower_that_fails_hurts_nobody_else() -> None:
    assert run_ranks(fail_behind_the_master, 3) == ["master", "only here", "follower"]


# It does not come to its end.


def linger_for(name: str, telling: str) -> None:
    """Stay here until a file is there; make the one to tell by once the others have heard that this rank is here."""
    while not Path(name).exists():
        if telling and told_function() == "linger_for":
            Path(telling).touch()
            telling = ""
        time.sleep(0.01)


def stay_in_the_block() -> tuple[str, str, str, float]:
    barriers.barrier("start")

    def prepare() -> None:
        with barriers.master_first("corpus") as is_first:
            if is_first:
                linger_for("go on", telling="inside")

    heartbeat.LOG_EVERY_S = 1.5
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
    return failure(prepare)


def test_a_killed_master_is_told_within_seconds() -> None:
    with WarmRanks(stay_in_the_block, 3) as ranks:
        ranks.wait_for_file("inside")
        ranks.kill(0)
        outcomes = ranks.outcomes()

    for outcome in outcomes[1:]:
        kind, message, _, after_s = outcome.value
        assert kind == "MasterFailedError"
        assert message.startswith(f"first 'corpus' can never end: rank 0 has died, last seen at {HERE}:")
        assert after_s < AT_ONCE_S


def test_a_stopped_master_is_waited_for_and_told_of_in_the_log() -> None:
    with WarmRanks(stay_in_the_block, 2) as ranks:
        ranks.wait_for_file("inside")
        ranks.kill(0, signal.SIGSTOP)
        stopped = f"s in first 'corpus': rank 0 is stopped (SIGSTOP; pid {ranks.pids[0]} on "
        until(lambda: stopped in ranks.log(1), 60, "a line in the log")
        assert "WARNING rank 1 has waited for " in ranks.log(1)
        (ranks.directory / "go on").touch()
        ranks.kill(0, signal.SIGCONT)
        outcomes = ranks.outcomes()

    assert [outcome.value[0] for outcome in outcomes] == ["", ""]


def never_come(how: str) -> tuple[str, str, str, float]:
    barriers.barrier("start")
    if dist.get_rank() == 0:
        if how == "leave":
            barriers.leave()
            until(Path("given up").exists, 60, "the other has given up")
        else:
            linger_for("given up", telling="elsewhere")
        return "", "", "", 0.0
    if how == "elsewhere":
        until(Path("elsewhere").exists, 60, "it is known where the master is")

    def prepare() -> None:
        with barriers.master_first("corpus", timeout_s=60.0 if how == "leave" else 1.5):
            pass

    try:
        return failure(prepare)
    finally:
        Path("given up").touch()


def test_a_master_that_has_left_is_told_at_once() -> None:
    kind, message, _, after_s = run_ranks(never_come, 2, "leave")[1]

    assert kind == "MasterFailedError"
    assert message.startswith("first 'corpus' can never end: rank 0 has ended without a call of first 'corpus' (its")
    assert after_s < AT_ONCE_S


def test_a_master_that_is_elsewhere_is_named_with_its_line_when_the_time_is_over() -> None:
    kind, message, _, _ = run_ranks(never_come, 2, "elsewhere")[1]

    assert kind == "BarrierTimeoutError"
    assert message.startswith(f"rank 0 did not finish first 'corpus' in 1.5 s: rank 0 is alive at {HERE}:")


# The ranks disagree.


def enter_different_blocks() -> tuple[str, str, str, float]:
    barriers.barrier("start")

    def prepare() -> None:
        if dist.get_rank() == 0:
            with barriers.master_first():
                pass
        else:
            with barriers.master_first():
                pass
        barriers.barrier("end")

    return failure(prepare)


def test_ranks_in_different_blocks_get_an_error_that_shows_both_sites() -> None:
    master, follower = run_ranks(enter_different_blocks, 2)

    assert (master[0], follower[0]) == ("BarrierDeadlockError", "BarrierDeadlockError")
    for _, message, _, after_s in (master, follower):
        assert f"waits in its 1st call of barrier 'end' at {HERE}:" in message
        assert f"waits in its 1st call of first '{HERE}:" in message
        assert after_s < AT_ONCE_S
    assert f"in prepare, its last first was '{HERE}:" in follower[1]


def take_blocks_in_another_order() -> bool:
    order = ("a", "b") if dist.get_rank() == 0 else ("b", "a")
    for name in order:
        with barriers.master_first(name):
            time.sleep(0.1)
    barriers.barrier("end")
    return True


def test_blocks_in_another_order_are_fine_as_long_as_the_master_does_not_wait() -> None:
    assert run_ranks(take_blocks_in_another_order, 3) == [True] * 3


def reduce_in_the_block() -> tuple[str, str, str, float]:
    barriers.barrier("start")

    def prepare() -> None:
        with barriers.master_first("corpus") as is_first:
            if is_first:
                # Past the guard, as a collective of a C++ extension would be.
                with _disable_current_modes():
                    dist.all_reduce(torch.ones(1))

    return failure(prepare)


def test_a_collective_in_the_block_that_no_guard_sees_is_told_by_those_who_wait_outside() -> None:
    (master_kind, _, _, _), (kind, message, _, after_s) = run_ranks(reduce_in_the_block, 2)

    assert (master_kind, kind) == ("RuntimeError", "BarrierDeadlockError")
    assert f"rank 0 waits in all_reduce #1 of group 0 at {HERE}:" in message
    assert "inside first 'corpus'" in message
    assert after_s < AT_ONCE_S


def meet_in_the_block() -> tuple[str, str, str, float]:
    barriers.barrier("start")

    def prepare() -> None:
        with barriers.master_first("corpus"):
            barriers.barrier("too early")

    return failure(prepare)


def test_a_barrier_in_the_block_is_an_error_on_every_rank() -> None:
    master, *others = run_ranks(meet_in_the_block, 3)

    assert master[0] == "BarrierUseError"
    assert "barrier 'too early' inside first 'corpus': the other ranks do not run this block now" in master[1]
    for kind, message, _, _ in others:
        assert kind == "MasterFailedError"
        assert "BarrierUseError: barrier 'too early' inside first 'corpus'" in message
