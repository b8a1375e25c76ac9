"""What can happen to a job in a story: kinds of faults, and what looks odd and is fine."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a fault is."""

    NONE = "none"
    # A call that does not fit, at one place of one rank.
    LEFT_OUT = "call left out"
    DOUBLED = "call doubled"
    MOVED = "call moved behind the next"
    OTHER_SIZE = "another size"
    OTHER_DTYPE = "another dtype"
    OTHER_ROOT = "another src"
    OTHER_OP = "another operation"
    OTHER_GROUP = "another group"
    SWALLOWED = "exception swallowed, rest of the step left out"
    EVALUATES_WRAPPED = "one rank evaluates through DDP"
    SEND_LEFT_OUT = "send left out"
    RECEIVE_LEFT_OUT = "receive left out"
    # A rank that goes no further.
    SLEEP = "sleep"
    LOCK = "lock"
    CHILD = "waits for a child process"
    LOADER = "waits for a DataLoader worker"
    FILE = "file that does not answer"
    GIL = "GIL held"
    STOP = "SIGSTOP"
    # A rank that ends.
    EXIT = "exit 0"
    RAISE = "exception"
    KILL = "SIGKILL"
    TERMINATE = "SIGTERM from outside"
    OOM = "out of memory"
    # More than one rank.
    HOST = "host lost"
    AGENT = "agent lost"
    LINK = "link between the hosts lost"
    ABSENT = "never joins"
    ALL_STAND = "all ranks stand still"
    # Time.
    SLOW = "slow"
    SLOW_NODE = "slow node"
    SLOW_IN_TURNS = "two slow in turns"
    SLOW_BACKWARD = "slow buckets"
    SLOW_INPUT = "slow input of a rank"
    # What looks odd and is fine.
    HICCUP = "hiccup"
    LONG_SAVE = "long checkpoint"
    LATE_IMPORT = "slow import"
    UNEVEN = "uneven work"
    RANK_0_EVALUATES = "rank 0 evaluates model.module"
    AGENT_ANEW = "agent restarts"
    LOSSY = "lossy telemetry"
    ENDS_WELL = "job ends well"
    # Kinds of the later rule (`stories.story_of`). Calls:
    OTHER_REDUCE_OP = "another reduce op"
    MOVED_FAR = "call moved behind several others"
    GROUP_ORDER = "groups called in another order"
    RETRIED = "exception swallowed, the step begun again"
    OTHER_MEMBERS = "another list of members for a group"
    NEW_GROUP_LEFT_OUT = "new_group left out"
    OTHER_DST = "another dst"
    # A rank that goes no further.
    RECEIVE_ANY = "recv from any that nobody sends"
    NOT_MONITORED = "absent from a monitored_barrier"
    FIRST_STANDS = "first one of a first-block stands"
    # Ends.
    RAISE_SLOWLY = "exception, and a slow end of the process"
    LEAVE_SLOWLY = "exit 0, and a slow end of the process"
    ALL_RAISE = "all ranks raise"
    CANCELLED = "hang, then all launchers end"
    NEVER_LAUNCHED = "launcher of a node never starts"
    # A program that is done, and a process that does not end.
    KEPT_BY_THREAD = "thread keeps the process"
    KEPT_BY_HANDLER = "exit handler keeps the process"
    KEPT_BY_PROCESS = "child keeps the process"
    # Memory.
    LEAK = "memory of a rank leaks"
    LEAK_OF_ALL = "memory of all ranks leaks"
    GPU_LEAK = "GPU memory of a rank leaks"
    # Time.
    SLOW_RARELY = "slow in each tenth step"
    # Lives of a job.
    RESTARTS = "attempt fails, the next one trains"
    FAILS_AGAIN = "attempt fails, the next one hangs"
    OTHER_JOB = "another job on the nodes hangs"
    # What looks odd and is fine.
    LOADS = "model loads"
    CACHE_FILLS = "cache fills"
    EPOCH_MEMORY = "memory given back at the end of an epoch"
    SLOW_END = "process ends slowly"
    LATE_IMPORTS = "imports of all lengths"
    LATE_LAUNCH = "launcher of a node starts late"
    LAUNCHER_ENDED = "launcher ended from outside"
    CROWDED = "crowded nodes, late probes"
    FIRST_TAKES_LONG = "first-block takes its time"
    # Kinds of the latest rule.
    KERNEL = "kernel that does not end"


CALL_FAULTS = frozenset(
    {
        Kind.LEFT_OUT,
        Kind.DOUBLED,
        Kind.MOVED,
        Kind.OTHER_SIZE,
        Kind.OTHER_DTYPE,
        Kind.OTHER_ROOT,
        Kind.OTHER_OP,
        Kind.OTHER_GROUP,
        Kind.SWALLOWED,
        Kind.EVALUATES_WRAPPED,
        Kind.SEND_LEFT_OUT,
        Kind.RECEIVE_LEFT_OUT,
        Kind.OTHER_REDUCE_OP,
        Kind.MOVED_FAR,
        Kind.GROUP_ORDER,
        Kind.RETRIED,
        Kind.OTHER_DST,
    }
)
STANDS = frozenset({Kind.SLEEP, Kind.LOCK, Kind.CHILD, Kind.LOADER, Kind.FILE, Kind.GIL, Kind.STOP})
STANDS_AT_A_CALL = frozenset(
    {Kind.OTHER_MEMBERS, Kind.NEW_GROUP_LEFT_OUT, Kind.RECEIVE_ANY, Kind.NOT_MONITORED, Kind.FIRST_STANDS}
)
IN_OPENING = frozenset({Kind.OTHER_MEMBERS, Kind.NEW_GROUP_LEFT_OUT, Kind.FIRST_STANDS})
"""Before the first step."""
KEPT = frozenset({Kind.KEPT_BY_THREAD, Kind.KEPT_BY_HANDLER, Kind.KEPT_BY_PROCESS})
LEAKS = frozenset({Kind.LEAK, Kind.LEAK_OF_ALL, Kind.GPU_LEAK})
ENDS = frozenset({Kind.EXIT, Kind.RAISE, Kind.KILL, Kind.TERMINATE, Kind.OOM})
SLOWNESS = frozenset(
    {Kind.SLOW, Kind.SLOW_NODE, Kind.SLOW_IN_TURNS, Kind.SLOW_BACKWARD, Kind.SLOW_INPUT, Kind.SLOW_RARELY}
)
HEALTHY = frozenset(
    {
        Kind.NONE,
        Kind.HICCUP,
        Kind.LONG_SAVE,
        Kind.LATE_IMPORT,
        Kind.UNEVEN,
        Kind.RANK_0_EVALUATES,
        Kind.AGENT_ANEW,
        Kind.LOSSY,
        Kind.ENDS_WELL,
        Kind.LOADS,
        Kind.CACHE_FILLS,
        Kind.EPOCH_MEMORY,
        Kind.SLOW_END,
        Kind.LATE_IMPORTS,
        Kind.LATE_LAUNCH,
        Kind.LAUNCHER_ENDED,
        Kind.CROWDED,
        Kind.FIRST_TAKES_LONG,
    }
)
ENDS_SLOWLY = frozenset({Kind.RAISE_SLOWLY, Kind.LEAVE_SLOWLY, Kind.ALL_RAISE})
RESTARTED = frozenset({Kind.RESTARTS, Kind.FAILS_AGAIN})
ODD = (Kind.HICCUP, Kind.AGENT_ANEW)
"""What may happen to a job before a fault, and is none."""
KINDS = tuple(Kind)
EARLIER_KINDS = KINDS[: KINDS.index(Kind.OTHER_REDUCE_OP)]
LATER_KINDS = KINDS[len(EARLIER_KINDS) : KINDS.index(Kind.KERNEL)]
LATEST_KINDS = KINDS[KINDS.index(Kind.KERNEL) :]
PAIRS = tuple(sorted(STANDS | ENDS))
"""Of which two may strike one job together."""
GLOO_ONLY = frozenset({Kind.RECEIVE_ANY, Kind.NOT_MONITORED})
"""NCCL has neither."""
NCCL_ONLY = frozenset({Kind.GPU_LEAK, Kind.KERNEL})
