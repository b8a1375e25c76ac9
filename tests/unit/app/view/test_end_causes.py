"""What is said of an end beside the rank's own words, and what to do about it; without facts nothing is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent.wire.ends import DiskLimit, EndFacts, FullDisk, GpuFault, Sender
from agent.wire.machine import GpuCondition, LimitKind, LimitReport, Xid
from agent.wire.reports import ExitReport
from app.diagnosis.causes import Cause
from app.diagnosis.memory import is_out_of_memory
from app.diagnosis.verdicts import Verdict
from app.manual import markdown
from app.model.xids import XIDS, Action, Blame
from app.view.end_causes import end_row
from app.view.rows import EndRow
from app.view.verdict_hints import hint
from app.view.verdict_text import sentence

GIB = 2**30
CUDA = "torch.AcceleratorError: CUDA error: unspecified launch failure"
NO_SPACE = "OSError: [Errno 28] No space left on device"
LIMIT = LimitReport(LimitKind.CGROUP, 8 * GIB, 7 * GIB)
FULL = FullDisk("/scratch", DiskLimit.SPACE, 4 * GIB, 0)


def verdict(facts: EndFacts, culprits: tuple[int, ...] = (2,), **end: Any) -> Verdict:
    exit_ = ExitReport(**end, facts=facts)
    cause = Cause.OOM if is_out_of_memory(exit_) else Cause.EXITED
    return Verdict(cause=cause, culprits=culprits, nodes=("n1",), job="train", attempt=0, exit=exit_)


def gpu(*xids: Xid, condition: GpuCondition = GpuCondition.OK) -> EndFacts:
    return EndFacts(gpu=GpuFault(3, condition, list(xids)))


SENTENCES: list[tuple[Verdict, str, str]] = [
    (
        verdict(gpu(Xid(79, 1, 0.4), condition=GpuCondition.LOST), signal=6),
        (
            "rank 2 on n1 was killed by SIGABRT; its GPU 3 reported Xid 79 (it has fallen off the bus) 0.4 s "
            "before, and is "
            "lost"
        ),
        (
            "drain n1 and reboot it, or switch it off and on; if it happens again, ask its vendor; leave n1 out: "
            "rankdeck "
            "restart --exclude"
        ),
    ),
    (
        verdict(gpu(condition=GpuCondition.LOST), signal=6),
        "rank 2 on n1 was killed by SIGABRT; its GPU 3 is lost",
        (
            "drain n1 and reboot it, or switch it off and on; if it happens again, ask its vendor; leave n1 out: "
            "rankdeck "
            "restart --exclude"
        ),
    ),
    (
        verdict(gpu(Xid(119, 1, 0.0), condition=GpuCondition.RESET_REQUIRED), signal=6),
        (
            "rank 2 on n1 was killed by SIGABRT; its GPU 3 reported Xid 119 (the GPU's own processor does not "
            "answer) as it "
            "ended, and needs a reset"
        ),
        (
            "end what uses GPU 3 on n1, then nvidia-smi --gpu-reset -i 3; if that fails, reboot n1; "
            "leave n1 out: "
            "rankdeck restart --exclude"
        ),
    ),
    (
        verdict(gpu(Xid(120, 1, 0.1)), signal=6),
        "rank 2 on n1 was killed by SIGABRT; its GPU 3 reported Xid 120 (the GPU's own processor failed) 0.1 s before",
        (
            "end what uses GPU 3 on n1, then nvidia-smi --gpu-reset -i 3; if that fails, reboot n1; see "
            "whether its "
            "driver is up to date"
        ),
    ),
    (
        verdict(gpu(Xid(31, 1, 0.2), Xid(43, 1, 0.1)), (2, 3), code=1, error=CUDA),
        (
            f"ranks 2-3 on n1 exited with code 1: {CUDA}; rank 2's GPU 3 reported Xid 43 (a program's channel was "
            "stopped) "
            "0.1 s before and Xid 31 (a kernel touched memory that it must not) 0.2 s before"
        ),
        "as a rule the program did this: run it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer",
    ),
    (
        verdict(gpu(Xid(74, 1, 1.0)), code=1, error=CUDA),
        f"rank 2 on n1 exited with code 1: {CUDA}; its GPU 3 reported Xid 74 (NVLink error) 1.0 s before",
        "see nvidia-smi nvlink --errorcounters on n1, its Fabric Manager and the GPU at the other end",
    ),
    (
        verdict(gpu(Xid(999, 1, 1.0)), code=1, error=CUDA),
        f"rank 2 on n1 exited with code 1: {CUDA}; its GPU 3 reported Xid 999 1.0 s before",
        "look it up in NVIDIA's catalog: https://docs.nvidia.com/deploy/xid-errors/",
    ),
    (
        verdict(EndFacts(disk=FULL), code=1, error=NO_SPACE),
        f"rank 2 on n1 exited with code 1: {NO_SPACE}; the file system /scratch is full (0 B of 4.0 GiB free)",
        "make room in /scratch on n1, or write elsewhere",
    ),
    (
        verdict(EndFacts(disk=FullDisk("/home", DiskLimit.INODES, GIB, GIB)), code=1, error=NO_SPACE),
        f"rank 2 on n1 exited with code 1: {NO_SPACE}; the file system /home has no inodes left",
        "remove small files in /home on n1: see df -i",
    ),
    (
        verdict(
            EndFacts(disk=FullDisk("/home", DiskLimit.QUOTA)), code=1, error="OSError: [Errno 122] Disk quota exceeded"
        ),
        "rank 2 on n1 exited with code 1: OSError: [Errno 122] Disk quota exceeded; the quota on /home is used up",
        "see quota -s, or lfs quota on Lustre on n1; remove files or ask for more",
    ),
    (
        verdict(EndFacts(), code=1, error=NO_SPACE),
        f"rank 2 on n1 exited with code 1: {NO_SPACE}",
        "a file system was full on n1: see df -h and df -i there, also for /dev/shm",
    ),
    (
        verdict(EndFacts(sender=Sender.RANKDECK), signal=9),
        "rank 2 on n1 was killed by SIGKILL; an operator had rankdeck send that signal",
        "the agent's audit log on n1 names the console",
    ),
    (
        verdict(EndFacts(memory_limit=LIMIT, cgroup="/slurm/uid_0/job_12/step_0"), signal=9, oom_kills=1),
        "rank 2 on n1 was killed by SIGKILL, when its cgroup job_12/step_0 was at its limit of memory (8.0 GiB)",
        (
            "give the Slurm job more with --mem; see the Memory view: fewer loader workers, smaller batches or "
            "fewer ranks on "
            "n1 need less"
        ),
    ),
    (
        verdict(EndFacts(cgroup="/user.slice", sender=Sender.OOMD), signal=9),
        "rank 2 on n1 was killed by SIGKILL, by oomd, since memory was short in its cgroup user.slice",
        "see the Memory view: fewer loader workers, smaller batches or fewer ranks on n1 need less",
    ),
    (
        verdict(EndFacts(), signal=24),
        "rank 2 on n1 was killed by SIGXCPU",
        "its limit of CPU time is used up: see ulimit -t on n1",
    ),
    (
        verdict(EndFacts(), signal=9),
        "rank 2 on n1 was killed by SIGKILL",
        "somebody on n1 sent it, or a memory guard; if nobody did, see dmesg for the kernel",
    ),
]


@pytest.mark.parametrize(("verdict", "text", "next_step"), SENTENCES, ids=[text[-60:] for _, text, _ in SENTENCES])
def test_each_cause_of_an_end_has_its_sentence_and_its_next_step(verdict: Verdict, text: str, next_step: str) -> None:
    assert sentence(verdict) == text
    assert hint(verdict, None) == next_step


@pytest.mark.parametrize(
    ("cgroup", "beginning"),
    [
        ("/system.slice/slurmstepd.scope/job_7/step_0/user", "give the Slurm job more with --mem"),
        ("/kubepods.slice/kubepods-burstable.slice/pod7", "raise limits.memory of the pod"),
        ("/docker/0f3c", "give the container more memory"),
        ("/user.slice/user-1000.slice/run-7.scope", "raise MemoryMax of the unit"),
        ("/rankdeck-7", "raise the limit of that cgroup"),
    ],
)
def test_who_sets_a_limit_is_known_by_the_name_of_its_cgroup(cgroup: str, beginning: str) -> None:
    one = verdict(EndFacts(memory_limit=LIMIT, cgroup=cgroup), signal=9, oom_kills=1)
    assert hint(one, None).startswith(f"{beginning}; ")


def test_hostile_names_are_cleaned_and_long_ones_cut() -> None:
    disk = FullDisk("/a\x1b[2J" + "b" * 200, DiskLimit.SPACE, GIB, 0)
    text = sentence(verdict(EndFacts(disk=disk), code=1, error=NO_SPACE))
    assert "\x1b" not in text
    assert len(text) < 200


def test_json_has_the_facts_or_nothing() -> None:
    assert end_row(None) is None
    assert end_row(ExitReport(signal=9)) is None
    assert end_row(ExitReport(signal=9, facts=gpu(Xid(31, 1, 0.1)))) is None, "no kernel sends it"
    assert end_row(ExitReport(code=1, error=CUDA, facts=gpu(Xid(999, 1, 0.1)))) == EndRow(
        3, "ok", [999], "", "", None, "", "", "", ""
    )
    facts = EndFacts(None, LIMIT, "/job_12", FULL, Sender.RANKDECK)
    assert end_row(ExitReport(signal=9, oom_kills=1, facts=facts)) == EndRow(
        None, "", [], "", "", 8 * GIB, "/job_12", "/scratch", "space", "rankdeck"
    )


def test_json_has_no_limit_of_memory_where_another_process_of_the_cgroup_was_killed() -> None:
    own = "KeyError: 'labels'"
    at_limit = EndFacts(memory_limit=LIMIT, cgroup="/job_12")
    assert end_row(ExitReport(code=1, error=own, oom_kills=1, facts=at_limit)) is None
    assert end_row(ExitReport(code=1, error=own, facts=EndFacts(cgroup="/user.slice", sender=Sender.OOMD))) is None


def test_the_manual_s_table_of_errors_agrees_with_the_catalog() -> None:
    rows = [line.strip("| ").split(" | ") for line in markdown("ends").splitlines() if re.match(r"\| \d", line)]
    words = {
        Action.FIX_PROGRAM: "program",
        Action.RESTART_JOB: "restart",
        Action.RESET_GPU: "reset",
        Action.REBOOT_NODE: "reboot",
        Action.CHECK_LINKS: "both ends",
        Action.NOTHING: "nothing",
    }
    codes = set()
    for numbers, _, do in rows:
        for number in numbers.split(", "):
            first, _, last = number.partition("-")
            for code in range(int(first), int(last or first) + 1):
                codes.add(code)
                assert words[XIDS[code].action] in do, code
    assert len(rows) == 10
    assert {code for code, kind in XIDS.items() if kind.blame is Blame.NOBODY} <= codes
