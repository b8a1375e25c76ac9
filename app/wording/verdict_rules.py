"""What each verdict rests on: who is named, what was compared, what cannot be known. README has the same table."""

from __future__ import annotations

from typing import NamedTuple


class VerdictRule(NamedTuple):
    """How one kind of verdict comes about."""

    verdict: str
    """Its cause, as the screen, the printed lines and `--json` name it, or a part of what has that cause."""
    named: str
    """Who is named, and what was compared."""
    unknown: str
    """What cannot be known, and what is shown then."""


VERDICT_RULES = (
    VerdictRule(
        "frozen",
        "a stopped process (SIGSTOP), at once: its state in /proc",
        "who stopped it",
    ),
    VerdictRule(
        "exited",
        "the rank that died first by its own cause: exit codes, signals, exceptions; an exception that nobody "
        "caught is named before its process has ended. Ranks that lost their connection by it are listed as that",
        'who sent a SIGKILL. Where all ranks have only lost a connection: "whose connection it lost is not known"',
    ),
    VerdictRule(
        "oom",
        "a rank that died for want of memory: its own exception, or a SIGKILL while the kernel counted a kill for "
        "want of memory on that machine",
        "a kill by another memory guard: exited, with a hint",
    ),
    VerdictRule(
        "memory_growth",
        "a rank whose memory, or its GPU's, grows steadily to a limit (machine, cgroup, ulimit, GPU) ten minutes "
        "away or less (a warning). It must have grown for as long as is left: a cache that fills and a model that "
        "loads are over before",
        "which object grows. A leak that fills the limit within about half a minute comes too fast: oom alone is said",
    ),
    VerdictRule(
        "fewer_calls",
        "a rank that left, is about to or has closed its process group, while others wait in a call that it never made",
        "why it left, where its code caught the exception",
    ),
    VerdictRule(
        "mismatch",
        "ranks whose calls at one place of a group's order differ: operation, size, element type, source, reduction"
        " or name. The first such place among their last 16 calls, with what each passes. The smaller side is "
        "named; of two equal sides both, but nobody where two wait for each other while others wait in sends and "
        "receives. A rank that gloo aborts is a victim of it",
        "source and reduction of calls by DDP's C++, reductions of NCCL's calls, sources of gloo's that are over: "
        'torch\'s recorder does not hold them. An abort that fits several ranks: "whose call differs is not known"',
    ),
    VerdictRule(
        "mismatch, in init_process_group",
        "ranks that go to different stores (MASTER_ADDR, MASTER_PORT), come as the same rank, or wait for more "
        "ranks than there are; the smaller part, or who has another's number",
        "the same for file:// and for stores that the program makes itself",
    ),
    VerdictRule(
        "mismatch, of send and recv",
        "ranks whose sends and receives do not meet: a cycle, a send that nobody receives, tags that differ; with "
        "each rank's peer. A receive with room for less than its send, at which gloo aborts: both, with their bytes",
        "with gloo the peer comes from the stack, with NCCL from torch's recorder: where it is not readable there, "
        "the rank is only shown as waiting",
    ),
    VerdictRule(
        "silent",
        "a rank whose process lives and that reports nothing: the GIL is held, or it sleeps in the kernel; after 2 "
        "s (4 s beside a rank that is frozen, or has failed or ended), after up to 10 s on a machine with far more "
        "to do than it bears",
        "its line, without py-spy on the node: the last one seen is said",
    ),
    VerdictRule(
        "standstill",
        "the few ranks that stand elsewhere than most; else nobody. No rank waits for another, none moves, and the "
        "next step is overdue by 10 s and by ten usual steps. The lines of all ranks are said. Where most stand and"
        " a few wait for them, nobody is named: the few may hold what the others need, as a lock. "
        "Once a rank has ended, those that are left are told after five minutes, as a warning",
        "which of the lines is at fault; a rank that computes at one line for long is given six times as long",
    ),
    VerdictRule(
        "not_exiting",
        "a rank whose program is done and whose process does not end for 10 s: the thread, exit handler, child "
        "process or full queue that keeps it, with its line",
        'where it is none of these: "what keeps it is not known"',
    ),
    VerdictRule(
        "node_lost",
        "all ranks of a node that no longer reports",
        'what they do. Where only the connection is lost, the connection is named and "what ranks 2-3 do is not known"',
    ),
    VerdictRule(
        "not_joined",
        "a rank that others have been waiting for in init_process_group for a minute, or for 10 s while it stands "
        "at one line before it",
        "why it does not come, where it has not imported torch: that is said",
    ),
    VerdictRule(
        "straggler, that stands",
        "a rank that keeps the others waiting for 10 s: a warning while it moves from line to line, an alarm once "
        "it has stood at one for 5 s. The first one of a first-block is shown without a warning until it has stood "
        "at one line for 10 s. Where it waits for a child process or DataLoader worker: its pid and, of Python, its"
        " line. Ranks that go on making steps while a few wait for them, as an evaluator does, are not named",
        "why that line takes long",
    ),
    VerdictRule(
        "straggler, that is slow",
        "a rank, several, or a node, for which the others lose a tenth of their time or more (of a node: a sixth), "
        "mostly within 15 s; who is slow in some steps alone (one that logs in each tenth, two in turns of seconds)"
        " from a sixth on, mostly within 40 s: what it costs, whether that grows, and what it does more than they "
        "do",
        "a rank that pauses once in some seconds, unless its pauses are long. Slow ranks where nobody records "
        "calls: only one that is slower by far. With NCCL, slow GPUs of ranks that queue steps ahead: a rank that "
        "is seen waiting for more than 80 % of its time is not named",
    ),
    VerdictRule(
        "input_bound",
        "nobody: all ranks spend half of their time or more waiting for data",
        "where the input is slow",
    ),
    VerdictRule(
        "transport",
        "nobody: every member has called, no rank is missing anywhere, and it does not complete. Before the first "
        "collective, or at a second group: all have come to init_process_group and do not meet, as with a stranger "
        "on MASTER_PORT: its pid and command are in the sentence where it runs on a node of the job",
        'which link fails. "Check the network" is said only where two machines or more take part, and no source or '
        "destination is unknown that may differ",
    ),
    VerdictRule(
        "checkpointing, evaluating",
        "a rank that the others wait for rightly; an alarm only when it takes far longer than ever before. "
        "torch.save and torch.distributed.checkpoint are known by themselves",
        'other ways to save, and evaluations outside the engine, without their mark: ddpcore.phase("checkpoint"), '
        'ddpcore.phase("eval")',
    ),
)
