"""A verdict's sentence says who, where, why, since when and who suffers; its hint says what to do next."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from agent.wire.machine import GrowthReport, LimitKind, LimitReport
from agent.wire.reports import ExitReport
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.memory import Growth
from app.diagnosis.verdicts import Aftermath, Side, Verdict
from app.diagnosis.wait_fractions import EarlierCost
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.view.verdict_hints import hint
from app.view.verdict_text import MAX_TEXT, sentence
from ddpcore.wire import ChildWait, ExitWait, PeerCall, Phase, Place

MIB, GIB = 2**20, 2**30
PLACE = Place("/home/user/train.py", 42, "train_step")
STANDING = Side((0, 1, 2, 3), "", 0, "", "", -1, PLACE)
READS = Place("/home/user/data.py", 12, "read")
APART = (
    Side((0, 1, 3), "", 0, "", "", -1, PLACE),
    Side((2,), "", 0, "", "", -1, READS),
)
RECEIVES = Side((0,), "0", 3, "recv", "", -1, PLACE, PeerCall("recv", 1, number=3))
MAKES_GROUP = replace(RECEIVES, peer_call=PeerCall("new_group", None))
MEETS = replace(RECEIVES, peer_call=PeerCall("monitored_barrier", None))
SHIFTED = (
    Side((2,), "0", 57, "all_reduce", "", 1, None, dtype="Float"),
    Side((0, 1), "0", 57, "all_reduce", "", 161, None, dtype="Float"),
)
TIMED_OUT = Aftermath((0, 3), is_timeout=True, timeout_s=20.0)
GROUP_1 = Side((0, 2), "1", 61, "all_reduce", "", -1, PLACE)
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


NO_AGENT = UnreachableReason("nothing is known of jobs there (rankdeck up demo-1)", UnreachableKind.AGENT)


def verdict(cause: Cause, **fields: Any) -> Verdict:
    facts: dict[str, Any] = {
        "culprits": (2,),
        "waiting": (0, 1, 3),
        "nodes": ("demo-1",),
        "job": "demo",
        "attempt": 0,
        "group": "0",
        "seq": 57,
        "op": "all_reduce",
        "waited_s": 1.7,
        "place": PLACE,
    }
    return Verdict(cause=cause, **(facts | fields))


def growth(kind: LimitKind, ranks: tuple[int, ...] = (2,), **fields: Any) -> Growth:
    limit = LimitReport(kind, 8 * GIB, 7 * GIB)
    facts: dict[str, Any] = {"rate_bytes_hz": 2 * MIB, "for_s": 840.0, "remaining_s": 545.0, "is_near": True}
    report = GrowthReport(limit, int(6.5 * GIB), **(facts | fields))
    rates = (report.rate_bytes_hz, report.rate_bytes_hz if len(ranks) == 1 else 1.5 * report.rate_bytes_hz)
    return Growth(ranks, ranks[-1], report, *rates)


SENTENCES: list[tuple[Verdict, str]] = [
    (
        verdict(Cause.MEMORY_GROWTH, waiting=(), growth=growth(LimitKind.CGROUP)),
        (
            "the memory of rank 2 on demo-1 grows by 120 MiB/min; about 9 min to the limit of its cgroup "
            "(8.0 GiB); it holds 6.5 GiB after 14 min of growth"
        ),
    ),
    (
        verdict(Cause.MEMORY_GROWTH, waiting=(), culprits=(2, 3), growth=growth(LimitKind.GPU, (2, 3), for_s=40.0)),
        (
            "the GPU memory of ranks 2-3 on demo-1 grows by 120 MiB/min to 180 MiB/min each; rank 3 is nearest: "
            "about 9 min to the memory of its GPU (8.0 GiB); it holds 6.5 GiB after 40 s of growth"
        ),
    ),
    (
        verdict(Cause.MEMORY_GROWTH, waiting=(), growth=growth(LimitKind.MACHINE, remaining_s=4.0)),
        (
            "the memory of rank 2 on demo-1 grows by 120 MiB/min; less than 10 s to the memory of the machine "
            "(8.0 GiB); it holds 6.5 GiB after 14 min of growth"
        ),
    ),
    (
        verdict(
            Cause.OOM,
            exit=ExitReport(signal=9, oom_kills=1),
            step=57,
            place=None,
            held_bytes=8 * GIB,
            growth=growth(LimitKind.ADDRESS_SPACE),
        ),
        (
            "rank 2 on demo-1 was killed by SIGKILL after step 57, when the kernel was out of memory; it held "
            "8.0 GiB; its memory had grown by 120 MiB/min for 14 min towards its limit of address space, "
            "ulimit -v (8.0 GiB); ranks 0-1, 3 waited for it in all_reduce #57"
        ),
    ),
    (
        verdict(Cause.FROZEN, for_s=1.8),
        (
            "rank 2 on demo-1 is frozen (SIGSTOP) for 1.8 s; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.FROZEN, for_s=1.8, culprits=(2, 3), waiting=(), place=None),
        "ranks 2-3 on demo-1 are frozen (SIGSTOP) for 1.8 s",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(signal=9), step=57, lost_connection=(3,)),
        (
            "rank 2 on demo-1 was killed by SIGKILL after step 57; ranks 0-1 waited for it in all_reduce #57; "
            "rank 3 lost its connection to it; last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(
            Cause.EXITED, exit=ExitReport(signal=9), culprits=(2, 3), waiting=(), lost_connection=(0, 1), place=None
        ),
        "ranks 2-3 on demo-1 were killed by SIGKILL; ranks 0-1 lost their connection to them",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=3, error="ValueError: boom\n"), waiting=(0,), seq=None, place=None),
        r"rank 2 on demo-1 exited with code 3: ValueError: boom\x0a; rank 0 waited for it",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=1, error=LOST), waiting=(), place=None),
        f"rank 2 on demo-1 exited with code 1: {LOST}; whose connection it lost is not known",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=2, last_line="no data\x1b"), waiting=(0,), seq=None, place=None),
        r"rank 2 on demo-1 exited with code 2; its last line: no data\x1b; rank 0 waited for it",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=2, last_line="no data"), culprits=(2, 3), waiting=(), place=None),
        "ranks 2-3 on demo-1 exited with code 2; rank 2's last line: no data",
    ),
    (
        verdict(
            Cause.EXITED,
            exit=ExitReport(code=2, last_line="train.py: error: unrecognized arguments: --slwo"),
            culprits=(0, 1, 2, 3),
            is_everyone=True,
            waiting=(),
            place=None,
        ),
        "all 4 ranks on demo-1 exited with code 2; rank 0's last line: train.py: error: unrecognized arguments: --slwo",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=1, last_line=LOST), waiting=(), place=None),
        f"rank 2 on demo-1 exited with code 1; its last line: {LOST}; whose connection it lost is not known",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(signal=15, error="KeyError: 'x'"), waiting=(), place=None),
        "rank 2 on demo-1 failed and was ended by SIGTERM then: KeyError: 'x'",
    ),
    (
        verdict(Cause.EXITED, exit=None, waiting=(), place=None, nodes=()),
        "rank 2 ended, it is not known how",
    ),
    (
        verdict(Cause.SILENT, for_s=4.0, waiting=(0,)),
        (
            "rank 2 on demo-1 has not reported for 4.0 s though its process lives; rank 0 waits for it "
            "in all_reduce #57 for 1.7 s; last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.SILENT, for_s=4.0, culprits=(2, 3), waiting=(), place=None),
        "ranks 2-3 on demo-1 have not reported for 4.0 s though their processes live",
    ),
    (
        verdict(Cause.NODE_LOST, for_s=7.0, culprits=(2, 3), nodes=("demo-1", "demo-2"), waiting=(), place=None),
        "demo-1 and demo-2 have not reported for 7.0 s: ranks 2-3 are lost",
    ),
    (
        verdict(
            Cause.MISMATCH,
            sides=(
                Side((2,), "0", 57, "barrier", "", -1, PLACE),
                Side((0, 1, 3), "0", 57, "all_reduce", "", 9, None),
            ),
        ),
        (
            "rank 2 calls barrier #57 at train.py:42 in train_step, ranks 0-1, 3 call all_reduce #57: "
            "they wait for each other for 1.7 s and never meet"
        ),
    ),
    (
        verdict(Cause.FEWER_CALLS, step=9, place=None, waiting_place=PLACE, exit=ExitReport()),
        (
            "rank 2 on demo-1 is about to end after step 9 without calling all_reduce #57; "
            "ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.EXITED, step=9, exit=ExitReport(error="ValueError: boom")),
        (
            "rank 2 on demo-1 fails after step 9: ValueError: boom; "
            "ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.MISMATCH, waiting=(), aborted=(2,), is_shifted=True, sides=SHIFTED),
        (
            "rank 2 calls all_reduce #57 with 1 element, ranks 0-1 call all_reduce #57 with 161 elements: gloo "
            "ended rank 2 (SIGABRT), which received more than expected; "
            "all ranks make both calls: rank 2 has left out or doubled one"
        ),
    ),
    (
        verdict(Cause.FEWER_CALLS, step=9, place=None),
        (
            "rank 2 on demo-1 finished (exit code 0) after step 9 without calling all_reduce #57; "
            "ranks 0-1, 3 waited for it in all_reduce #57"
        ),
    ),
    (
        verdict(Cause.FEWER_CALLS, waiting=(), lost_connection=(0, 3), place=None, waiting_place=PLACE),
        (
            "rank 2 on demo-1 finished (exit code 0) without calling all_reduce #57; "
            "ranks 0, 3 lost their connection to it at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.FEWER_CALLS, seq=None, waiting=(), place=None),
        "rank 2 on demo-1 finished (exit code 0) before the others",
    ),
    (
        verdict(Cause.TRANSPORT, culprits=(), waiting=(0, 1)),
        (
            "every member has called all_reduce #57 and it does not complete; ranks 0-1 wait for 1.7 s "
            "at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.TRANSPORT, culprits=(), waiting=(0,), place=None),
        "every member has called all_reduce #57 and it does not complete; rank 0 waits for 1.7 s",
    ),
    (
        verdict(Cause.TRANSPORT, culprits=(), op="broadcast", waiting=(0, 1), place=None, is_root_unknown=True),
        (
            "every member has called broadcast #57 and it does not complete; which src each rank passes is not "
            "known: they may differ; ranks 0-1 wait for 1.7 s"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, phase=Phase.DATA),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "rank 2 is loading data at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, phase=Phase.OTHER, cpu_cores=0.98),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "rank 2 is at train.py:42 in train_step and uses 98 % of a CPU"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, phase=Phase.OTHER, cpu_cores=0.0, is_blocked=True, place=None),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "rank 2 is in uninterruptible sleep"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, phase=Phase.OTHER, culprits=(2, 3), waiting=(0, 1), place=None),
        "ranks 2-3 on demo-1 hold the others up; ranks 0-1 wait for them in all_reduce #57 for 1.7 s",
    ),
    (
        verdict(Cause.STRAGGLER, phase=None, place=None, nodes=(), unreported=()),
        (
            "rank 2 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "no host that is watched here reports it"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, phase=None, place=None, nodes=(), unreported=("demo-1",)),
        ("rank 2 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; nothing came from demo-1"),
    ),
    (
        verdict(Cause.STRAGGLER, phase=None, place=None),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; "
            "rank 2 is still starting"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, cost_frac=0.8, wait_frac=0.02, slow_factor=8.0),
        (
            "rank 2 on demo-1 is slow and costs the others about 80 % of the step time; slowed 8x on request; "
            "last seen at train.py:42 in train_step; it waits 2 % of the time"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, cost_frac=0.3, last_frac=0.97, place=None, earlier_cost=EarlierCost(0.12, 185.0)),
        (
            "rank 2 on demo-1 is slow and costs the others about 30 % of the step time, up from 12 % 3 min 5 s "
            "ago; it comes last to 97 % of the collectives"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, cost_frac=0.3, wait_frac=0.02, last_frac=0.2, is_at_times=True, place=None),
        (
            "rank 2 on demo-1 is slow in some steps and costs the others about 30 % of the step time; "
            "it waits 2 % of the time"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, cost_frac=0.8, wait_frac=0.02, culprits=(2, 3), place=None),
        "ranks 2-3 on demo-1 are slow and cost the others about 80 % of the step time; they wait 2 % of the time",
    ),
    (
        verdict(Cause.STANDSTILL, culprits=(), waiting=(), for_s=11.0, is_behind_work=True),
        (
            "no GPU has come to all_reduce #57 for 11 s: work before it does not end; "
            "last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, waiting=(), for_s=11.0, is_behind_work=True, place=None),
        "the GPU of rank 2 on demo-1 has not come to all_reduce #57 for 11 s: work before it does not end",
    ),
    (
        verdict(Cause.STRAGGLER, phase=Phase.BACKWARD, is_behind_work=True),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; its GPU has "
            "not come to that call; rank 2 is in backward at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, culprits=(), waiting=(), seq=None, step=60, for_s=11.0, sides=(STANDING,)),
        (
            "no rank has moved for 11 s after step 60, and none waits in a collective; "
            "ranks 0-3 stand at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, culprits=(), waiting=(), for_s=11.0, sides=(STANDING,), cpu_cores=0.02),
        (
            "no rank has moved for 11 s, and none waits in a collective; "
            "ranks 0-3 stand at train.py:42 in train_step; none of them uses a CPU"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, culprits=(), waiting=(), for_s=61.0, sides=(STANDING,), cpu_cores=1.9),
        (
            "no rank has moved for 1 min 1 s, and none waits in a collective; "
            "ranks 0-3 stand at train.py:42 in train_step; the busiest of them uses 190 % of a CPU"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, waiting=(), seq=None, for_s=11.0, sides=APART, child=ChildWait(77, "subprocess")),
        (
            "no rank has moved for 11 s, and none waits in a collective; rank 2 on demo-1 stands at data.py:12 in "
            "read, ranks 0-1, 3 stand at train.py:42 in train_step; rank 2 waits for its subprocess (pid 77)"
        ),
    ),
    (
        verdict(Cause.NOT_EXITING, waiting=(), seq=None, for_s=11.0, exit_wait=ExitWait("thread", "uploader", PLACE)),
        (
            "rank 2 on demo-1 has finished its program, but its process has not ended for 11 s; "
            'its non-daemon thread "uploader" still runs at train.py:42 in train_step'
        ),
    ),
    (
        verdict(Cause.NOT_EXITING, waiting=(), seq=None, for_s=11.0, exit_wait=ExitWait("queue")),
        (
            "rank 2 on demo-1 has finished its program, but its process has not ended for 11 s; "
            "its multiprocessing.Queue holds what nobody takes"
        ),
    ),
    (
        verdict(Cause.STANDSTILL, culprits=(), waiting=(3,), for_s=11.0, sides=(replace(STANDING, ranks=(0, 1, 2)),)),
        (
            "no rank has moved for 11 s; ranks 0-2 stand at train.py:42 in train_step; "
            "rank 3 waits for them in all_reduce #57 for 1.7 s"
        ),
    ),
    (
        verdict(Cause.FROZEN, waiting_here=(1,), for_s=2.0),
        (
            "rank 2 on demo-1 is frozen (SIGSTOP) for 2.0 s; rank 1 waits for it in all_reduce #57 for 1.7 s, "
            "ranks 0, 3 in other calls; last seen at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.NOT_EXITING, waiting=(), seq=None, for_s=11.0, exit_wait=ExitWait("process", pid=77)),
        (
            "rank 2 on demo-1 has finished its program, but its process has not ended for 11 s; "
            "its child process 77 still runs"
        ),
    ),
    (
        verdict(
            Cause.STRAGGLER,
            phase=Phase.DATA,
            child=ChildWait(77, "loader worker"),
            child_place=Place("/home/user/data.py", 12, "read"),
        ),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s; rank 2 is "
            "loading data at train.py:42 in train_step; rank 2 waits for its loader worker (pid 77), which is at "
            "data.py:12 in read"
        ),
    ),
    (
        verdict(Cause.SILENT, for_s=3.0, is_seen_outside=True),
        (
            "rank 2 on demo-1 has not reported for 3.0 s though its process lives; ranks 0-1, 3 wait for it in "
            "all_reduce #57 for 1.7 s; py-spy sees it at train.py:42 in train_step"
        ),
    ),
    (
        verdict(
            Cause.MISMATCH,
            sides=(
                Side((0,), "0", 3, "recv", "", -1, PLACE, PeerCall("recv", 1, number=3)),
                Side((1,), "0", 1, "send", "", -1, PLACE, PeerCall("send", 0, tag=7, number=1)),
            ),
        ),
        (
            "rank 0 calls recv #3 from rank 1 at train.py:42 in train_step, rank 1 calls send #1 to rank 0 with "
            "tag 7 at train.py:42 in train_step: they wait for each other for 1.7 s and never meet"
        ),
    ),
    (
        verdict(Cause.FROZEN, for_s=1.8, place=None),
        "rank 2 on demo-1 is frozen (SIGSTOP) for 1.8 s; ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s",
    ),
    (
        verdict(Cause.EXITED, exit=ExitReport(code=3, error="ValueError: boom"), waiting=(), place=None),
        "rank 2 on demo-1 exited with code 3: ValueError: boom",
    ),
    (
        verdict(Cause.OOM, exit=ExitReport(signal=9, oom_kills=1), waiting=(), place=None),
        "rank 2 on demo-1 was killed by SIGKILL, when the kernel was out of memory",
    ),
    (
        verdict(Cause.SILENT, for_s=4.0, waiting=(), place=None),
        "rank 2 on demo-1 has not reported for 4.0 s though its process lives",
    ),
    (
        verdict(Cause.NODE_LOST, for_s=7.0, culprits=(2, 3), waiting=(), place=None),
        "demo-1 has not reported for 7.0 s: ranks 2-3 are lost",
    ),
    (
        verdict(
            Cause.NOT_JOINED,
            op="init_process_group",
            seq=None,
            waited_s=65.0,
            is_born=True,
            phase=Phase.STARTING,
            place=READS,
        ),
        (
            "rank 2 on demo-1 has not come to init_process_group; ranks 0-1, 3 wait for it there for 1 min 5 s; "
            "rank 2 is at data.py:12 in read"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, waiting=(0, 1), waited_s=12.0, phase=Phase.DATA, place=READS, cpu_cores=0.01),
        (
            "rank 2 on demo-1 holds the others up; ranks 0-1 wait for it in all_reduce #57 for 12 s; "
            "rank 2 is loading data at data.py:12 in read and uses no CPU"
        ),
    ),
    (
        verdict(Cause.STRAGGLER, cost_frac=0.3, wait_frac=0.02, place=None),
        "rank 2 on demo-1 is slow and costs the others about 30 % of the step time; it waits 2 % of the time",
    ),
    (
        verdict(
            Cause.MISMATCH,
            sides=(Side((2,), "0", 57, "barrier", "", -1, None), Side((0, 1, 3), "0", 57, "all_reduce", "", 9, None)),
        ),
        "rank 2 calls barrier #57, ranks 0-1, 3 call all_reduce #57: they wait for each other for 1.7 s and never meet",
    ),
    (
        verdict(Cause.STANDSTILL, waiting=(), seq=None, for_s=11.0, sides=APART),
        (
            "no rank has moved for 11 s, and none waits in a collective; rank 2 on demo-1 stands at "
            "data.py:12 in read, ranks 0-1, 3 stand at train.py:42 in train_step"
        ),
    ),
    (
        verdict(Cause.INPUT_BOUND, culprits=(), waiting=(), cost_frac=0.62, place=None),
        "the ranks spend 62 % of their time waiting for input",
    ),
    (
        verdict(Cause.CHECKPOINTING, waiting=(), for_s=12.0, usual_s=30.0, place=None),
        "rank 2 on demo-1 is saving a checkpoint for 12 s (the longest so far took 30 s)",
    ),
]


@pytest.mark.parametrize(("told", "text"), SENTENCES)
def test_each_cause_has_its_sentence(told: Verdict, text: str) -> None:
    assert sentence(told) == text


@pytest.mark.parametrize(
    ("told", "pid", "words"),
    [
        (verdict(Cause.FROZEN), 4002, "thaw it: kill -CONT 4002 on demo-1"),
        (verdict(Cause.FROZEN), None, "thaw it; a debugger"),
        (verdict(Cause.FROZEN, culprits=(2, 3)), 4002, "thaw each of them, rank 2 by kill -CONT 4002 on demo-1; a"),
        (verdict(Cause.FROZEN, culprits=(2, 3), nodes=("n0", "n1")), 4002, "thaw each of them; a debugger"),
        (verdict(Cause.SILENT, culprits=(2, 3)), 4002, "look at rank 2 on demo-1 with py-spy dump --pid 4002: a C"),
        (verdict(Cause.SILENT), 4002, "py-spy dump --pid 4002"),
        (verdict(Cause.SILENT), None, "look at it on demo-1: a C extension"),
        (verdict(Cause.SILENT, is_blocked=True), 4002, "a network file system on demo-1"),
        (verdict(Cause.NODE_LOST), None, "is demo-1 up"),
        (verdict(Cause.NODE_LOST, nodes=()), None, "is the node up"),
        (
            verdict(Cause.CHECKPOINTING, aftermath=TIMED_OUT),
            None,
            "save asynchronously, or give the group a longer time",
        ),
        (verdict(Cause.EVALUATING, aftermath=TIMED_OUT), None, "share the evaluation among all ranks, or give the gr"),
        (verdict(Cause.MISMATCH), None, "different branches"),
        (verdict(Cause.MISMATCH, sides=(RECEIVES, replace(RECEIVES, ranks=(1,)))), None, "each send needs its receive"),
        (verdict(Cause.MISMATCH, sides=(MAKES_GROUP, RECEIVES)), None, "every rank calls new_group for every group"),
        (verdict(Cause.MISMATCH, sides=(MEETS, RECEIVES)), None, "calls monitored_barrier as often"),
        (verdict(Cause.MISMATCH, sides=(GROUP_1, replace(GROUP_1, group="2"))), None, "the groups in the same order"),
        (verdict(Cause.MISMATCH, sides=(GROUP_1, replace(GROUP_1, num_elements=7))), None, "pass the same sizes"),
        (
            verdict(Cause.MISMATCH, sides=(GROUP_1, replace(GROUP_1, num_elements=7, place=replace(PLACE, line=7)))),
            None,
            "may have left out a call; make the same calls on every rank",
        ),
        (
            verdict(Cause.MISMATCH, aborted=(2,), sides=(GROUP_1,), culprits=(2,), place=None),
            None,
            "pass the same sizes",
        ),
        (verdict(Cause.MISMATCH, aborted=(1,), sides=(GROUP_1,), culprits=()), None, "pass the same sizes"),
        (
            verdict(Cause.MISMATCH, aborted=(1,), sides=(GROUP_1,), culprits=(1,), place=replace(PLACE, line=7)),
            None,
            "the lines differ: a rank may have left out a call",
        ),
        (
            verdict(Cause.NODE_LOST, unreachable_reason=NO_AGENT, severity=Severity.WARNING),
            None,
            "start the agent on demo-1 again (rankdeck up)",
        ),
        (
            verdict(Cause.NODE_LOST, unreachable_reason=UnreachableReason("frozen"), severity=Severity.WARNING),
            None,
            "rankdeck doctor shows what is wrong with demo-1; training needs no agent",
        ),
        (
            verdict(Cause.NODE_LOST, unreachable_reason=UnreachableReason("the connection is lost")),
            None,
            "rankdeck restart demo --exclude demo-1 --on-these-hosts, or x in the console",
        ),
        (
            verdict(Cause.NODE_LOST, unreachable_reason=NO_AGENT),
            None,
            "rankdeck up demo-1 starts its agent again; x in the console restarts without demo-1",
        ),
        (
            verdict(Cause.NODE_LOST, unreachable_reason=NO_AGENT._replace(why="its relay has seen its end")),
            None,
            "without it: rankdeck restart demo --exclude demo-1",
        ),
        (verdict(Cause.STANDSTILL), None, "a file system, lock or server"),
        (verdict(Cause.STRAGGLER, is_behind_work=True), None, "CUDA_LAUNCH_BLOCKING=1 to see which kernel"),
        (verdict(Cause.STANDSTILL, waiting=(3,)), None, "rank 3 may hold what the others need"),
        (verdict(Cause.NOT_EXITING), None, "make it a daemon"),
        (verdict(Cause.NOT_EXITING, exit_wait=ExitWait("queue")), None, "cancel_join_thread()"),
        (verdict(Cause.MEMORY_GROWTH, growth=growth(LimitKind.CGROUP)), None, "losses without .item()"),
        (verdict(Cause.FEWER_CALLS), None, "uneven inputs"),
        (verdict(Cause.TRANSPORT, num_hosts=2), None, "firewall"),
        (verdict(Cause.TRANSPORT, num_hosts=2, away=("demo-1", 62.0, 12.0)), None, "wait before you restart; if not,"),
        (verdict(Cause.TRANSPORT, num_hosts=2, away=("demo-1", 62.0, 63.0)), None, "check the network"),
        (verdict(Cause.TRANSPORT, op="reduce", num_hosts=2, is_root_unknown=True), None, "compare dst at that line"),
        (
            verdict(Cause.TRANSPORT, num_hosts=1, seq=7, num_members=4),
            None,
            "if each has a GPU of its own, try NCCL_P2P",
        ),
        (
            verdict(Cause.TRANSPORT, num_members=1),
            None,
            "run with CUDA_LAUNCH_BLOCKING=1, and its stack shows that line",
        ),
        (verdict(Cause.TRANSPORT, num_hosts=1, seq=None), None, "MASTER_PORT"),
        (verdict(Cause.EXITED, exit=ExitReport(signal=9)), None, "somebody on demo-1 sent it, or a memory guard"),
        (verdict(Cause.EXITED, exit=ExitReport(signal=6)), None, "sizes or types differ"),
        (verdict(Cause.EXITED, exit=ExitReport(signal=11)), None, "native code: run with PYTHONFAULTHANDLER=1"),
        (
            verdict(Cause.EXITED, exit=ExitReport(signal=11, error="Fatal Python error: Segmentation fault")),
            None,
            "a crash in native code: rankdeck logs demo --rank 2 has the whole traceback",
        ),
        (verdict(Cause.EXITED, exit=ExitReport(signal=7)), None, "/dev/shm on demo-1"),
        (verdict(Cause.EXITED, exit=ExitReport(signal=15)), None, "asked it to end on demo-1"),
        (verdict(Cause.EXITED, exit=ExitReport(signal=8)), None, "see the logs of rank 2"),
        (
            verdict(Cause.EXITED, exit=ExitReport(code=1, error="OSError")),
            None,
            "the whole traceback: rankdeck logs demo --rank 2",
        ),
        (
            verdict(Cause.EXITED, exit=ExitReport(code=1, error="NCCL invalid usage: Duplicate GPU detected : rank 1")),
            None,
            "each rank needs a GPU of its own: torch.cuda.set_device(LOCAL_RANK), and no more ranks than GPUs",
        ),
        (
            verdict(Cause.EXITED, exit=ExitReport(code=1)),
            None,
            "it left no traceback: see the logs of rank 2: rankdeck logs demo --rank 2",
        ),
        (
            verdict(Cause.EXITED, exit=ExitReport(code=2), culprits=(0, 1, 2, 3), is_everyone=True),
            None,
            "they left no traceback: see the logs of rank 0: rankdeck logs demo --rank 0",
        ),
        (verdict(Cause.EXITED), None, "see the logs of rank 2"),
        (verdict(Cause.STRAGGLER, slow_factor=8.0), None, "factor 1"),
        (verdict(Cause.STRAGGLER, phase=Phase.EVAL), None, "a growing one is not"),
        (verdict(Cause.STRAGGLER, phase=Phase.STARTING), None, "an import or a download"),
        (verdict(Cause.STRAGGLER, phase=Phase.DATA), None, "at loader workers on demo-1"),
        (
            verdict(Cause.STRAGGLER, phase=Phase.FORWARD, cpu_cores=0.3),
            None,
            "a loop may not end, or a computation take long; s in the console, or rankdeck stacks demo, shows",
        ),
        (
            verdict(Cause.STRAGGLER, phase=Phase.DATA, cpu_cores=1.0),
            None,
            "a loop may not end, or a computation take long; s in the console, or rankdeck stacks demo, shows",
        ),
        (
            verdict(Cause.STRAGGLER, phase=Phase.FORWARD, cpu_cores=0.0),
            None,
            "a file system, lock or server may not answer on demo-1; s in the console, or rankdeck stacks demo, shows",
        ),
        (verdict(Cause.STRAGGLER, phase=Phase.DATA, cpu_cores=0.0), None, "at loader workers on demo-1"),
        (
            verdict(Cause.STRAGGLER, phase=Phase.OTHER, is_blocked=True),
            None,
            "file system on demo-1 does not answer; see",
        ),
        (verdict(Cause.STANDSTILL, cpu_cores=1.0), None, "look at these lines: a loop may not end"),
        (verdict(Cause.STRAGGLER, phase=Phase.FORWARD, cost_frac=0.2), None, "the load on demo-1"),
    ],
)
def test_each_cause_has_its_next_step(told: Verdict, pid: int | None, words: str) -> None:
    assert words in hint(told, pid)


def test_who_uses_some_cpu_may_neither_loop_nor_wait() -> None:
    told = verdict(Cause.STRAGGLER, phase=Phase.FORWARD, cpu_cores=0.2)
    assert hint(told, None) == "s in the console, or rankdeck stacks demo, shows its stack; x stops or restarts"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (verdict(Cause.NODE_LOST, waiting=()), "cannot go on"),
        (verdict(Cause.NOT_JOINED, aftermath=TIMED_OUT), "the others begin"),
        (verdict(Cause.TRANSPORT, num_hosts=2, away=("demo-1", 62.0, 12.0), aftermath=TIMED_OUT), "wait before"),
        (verdict(Cause.SILENT, culprits=(2, 3), nodes=("n0", "n1")), "--pid"),
    ],
)
def test_a_next_step_says_nothing_that_is_over_or_not_so(told: Verdict, words: str) -> None:
    assert words not in hint(told, 4002)


def test_a_sentence_is_bounded_and_clean() -> None:
    told = verdict(
        Cause.EXITED, exit=ExitReport(code=1, error="\x1b[2J" * 2000), place=Place("/x\x1b.py", 1, "f" * 256)
    )

    assert len(sentence(told)) <= MAX_TEXT
    assert "\x1b" not in sentence(told)


def test_sides_that_make_the_same_call_are_told_apart_by_size() -> None:
    sides = (Side((1,), "0", 3, "all_reduce", "", 1, None), Side((0,), "0", 3, "all_reduce", "", 6, None))

    assert sentence(verdict(Cause.MISMATCH, sides=sides)).startswith(
        "rank 1 calls all_reduce #3 with 1 element, rank 0 calls all_reduce #3 with 6 elements: "
    )


def test_a_circle_of_more_than_two_begins_with_who_waits() -> None:
    sides = tuple(
        Side((rank,), "0", 3, "recv", "", -1, None, PeerCall("recv", (rank + 1) % 3, number=3)) for rank in range(3)
    )

    assert sentence(verdict(Cause.MISMATCH, sides=sides)) == (
        "ranks 0-2 wait for each other for 1.7 s: rank 0 calls recv #3 from rank 1, rank 1 calls recv #3 from rank 2, "
        "rank 2 calls recv #3 from rank 0"
    )


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (Aftermath((0, 3), is_timeout=True, timeout_s=20.0), "the job ended when ranks 0, 3 timed out after 20 s"),
        (Aftermath((0,), is_timeout=True), "the job ended when rank 0 timed out"),
        (Aftermath((0, 3)), "the job ended when ranks 0, 3 lost their connection"),
        (Aftermath((0, 1, 2), signal=15), "the job ended when ranks 0-2 were ended by SIGTERM"),
        (
            Aftermath((0,), signal=9, is_with_launcher=True),
            "the job ended when rank 0 was ended by SIGKILL with its launcher",
        ),
    ],
)
def test_a_hang_that_has_ended_is_told_with_its_end(after: Aftermath, text: str) -> None:
    frozen = verdict(Cause.FROZEN, for_s=20.0, place=None, aftermath=after)
    assert sentence(frozen).endswith(f"; {text}")
    assert "thaw" not in hint(frozen, 4002)


HANGS = (Cause.FROZEN, Cause.SILENT, Cause.NOT_JOINED, Cause.MISMATCH, Cause.TRANSPORT, Cause.STRAGGLER)
PRESENT = re.compile(r"\b(is|are|has|have|waits?|holds?|lives?|[0-9] calls?|uses?|does|stands?|never meet)\b")
OF_TODAY = ("is not known: they may differ", "is watched here")
"""What the console knows now, and watches."""


@pytest.mark.parametrize(
    "hang",
    [
        one
        for one, _ in SENTENCES
        if one.cause in {*HANGS, Cause.STANDSTILL} and one.cost_frac is None and not one.aborted and not one.meetings
    ],
)
def test_a_hang_that_has_ended_is_in_the_past(hang: Verdict) -> None:
    text, _, end = sentence(replace(hang, aftermath=TIMED_OUT)).rpartition("; ")

    assert end == "the job ended when ranks 0, 3 timed out after 20 s"
    assert PRESENT.findall(re.sub("|".join(OF_TODAY), "", text)) == []
