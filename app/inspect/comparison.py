"""Compares the ranks of a job that were only seen from outside: who waits where, who is elsewhere, who moves. Pure.

A rank's looks are first made one `Standing`; `finding_of` compares those. It names only a rank that no other rank
explains. A rank that moves may save, evaluate or prepare data: others rightly wait for it, and it is no alarm. One that
only runs within one function, where no step number rises, is, once the others have waited long: its loop may not end.

Source of the functions: torch 2.1 to 2.13, torch/distributed/distributed_c10d.py and torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from app.diagnosis.causes import Severity
from app.inspect.seen import MAX_FRAMES
from ddpcore.wire import Place

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from app.inspect.seen import Look, SeenFrame, SeenJob, SeenRank

LIBRARY = re.compile(r"^<|/lib(64)?/python3?(\.\d+)?t?/|/(site|dist)-packages/|\.zip/")
C10D = "torch/distributed/distributed_c10d.py"
HIDDEN = re.compile(r"^_|^(wrapper|decorate_context|inner|wait|is_.*|get_.*)$")
"""Functions of distributed_c10d.py that are no call of the program."""
JOINING = {"init_process_group", "_create_c10d_store", "_env_rendezvous_handler", "_tcp_rendezvous_handler"}
DDP_CALLS = {
    "_sync_buffers": "DDP's broadcast of buffers",
    "_sync_module_states": "DDP's broadcast of parameters",
    "_distributed_broadcast_coalesced": "DDP's broadcast of buffers",
    "_verify_param_shape_across_processes": "DDP's check of the parameters",
}
BACKWARD = {"_engine_run_backward", "backward"}
DEVICE_CALLS = {"synchronize", "wait_stream"}
"""Functions that wait for a GPU's queue: ranks of NCCL stand there while others are missing.

`item()`, `cpu()` and `to()` wait as well, at full CPU, but have no frame: they are the line of the program itself.
"""
STEP_ORDER = ("global_step", "step", "batch_idx", "iteration", "it", "i", "epoch")
PEERS = ("src", "dst")
PHASES = (
    ("saves a checkpoint", re.compile(r"torch/(serialization|distributed/checkpoint/.*)\.py$")),
    ("loads data", re.compile(r"torch/utils/data/.*\.py$")),
    ("imports", re.compile(r"^<frozen importlib\._bootstrap")),
)
PROGRAM = {"<module>", "_run_module_as_main", "_bootstrap", "run"}
"""Outermost functions while the program runs; once it is over, others wait for exit handlers and threads."""
BUSY = 0.2
"""Fraction of a core from which a rank computes."""
SPINS = 0.8
"""Fraction of a core from which a rank may wait for its GPU: CUDA polls."""
MAX_SWITCHES_HZ = 3.0
"""A main thread that stands gives up its core less often; one that trains does so at each step.

One that computes does, too, beside a thread of Python such as rankdeck's probe: it waits until that has had the GIL.
"""
COMPUTES = 0.5
"""Fraction of the time that a main thread has run, or waited for a core, from which it does not sleep in turns."""
RISES = 0.5
"""Part of the looks in which a step number has to rise: of twelve numbers in any order, about five do.

Of a loop of some thousand turns a second five of twelve looks were seen to show something else.
"""
MOVED_BYTES_HZ = 1 << 18
"""A rank that reads or writes more than this is at work, even if its stack stays."""
START_S = 60.0
"""Seconds in which a rank may still be on its way to init_process_group."""
SURE_S = 8.0
"""Seconds for which ranks must have been at one place: they may read a slow disk, compute, or wait for a long call."""
SURE_ON_GPU_S = 30.0
"""The same where ranks wait for their GPUs: a healthy job with long steps stands there most of the time."""
SURE_LOOP_S = 30.0
"""Seconds that others must have slept in a call for a rank that runs within one function: it may have work there."""
SPARE_LOOKS = 4


class Kind(StrEnum):
    """What a rank does, as far as it can be seen from outside."""

    WAITS = "waits"
    """It stands in a collective, or in another call that needs other ranks."""
    JOINS = "joins"
    """It stands in init_process_group."""
    DEVICE = "waits for its GPU"
    """It stands in a call that waits for the GPU's queue; the queue may hold a collective, or work."""
    ELSEWHERE = "is elsewhere"
    FROZEN = "frozen"
    BLOCKED = "blocked"
    """Uninterruptible sleep in the kernel."""
    UNSEEN = "not seen"
    ENDING = "has finished its program"
    """Its process waits for a thread or a child of its own."""
    ENDED = "ended"


class What(StrEnum):
    """What a comparison has found."""

    FROZEN = "frozen"
    ELSEWHERE = "elsewhere"
    """Ranks have not come to the call in which others wait."""
    MISMATCH = "mismatch"
    """All wait, in different calls."""
    MISSING = "missing"
    """All that were seen wait in one call; others have ended, or run where nobody looked."""
    SAME_CALL = "same_call"
    """All wait in one call."""
    NOT_EXITING = "not_exiting"
    """Ranks have finished their program, and their processes do not end."""
    STANDSTILL = "standstill"
    """No rank moves, and none waits in a call."""
    STANDING = "standing"
    """Some ranks stand, the others move, and none waits in a call."""
    MOVING = "moving"
    UNSEEN = "unseen"
    """Ranks whose stacks could not be read."""


class Standing(msgspec.Struct, frozen=True):
    """What some looks at a rank have shown together."""

    rank: SeenRank
    kind: Kind
    op: str
    """The call in which it waits, with its peer: `broadcast(src=1)`; else the innermost function of a library."""
    place: Place | None
    """Innermost line of the user's program."""
    is_moving: bool
    is_in_loop: bool
    """Whether it moves, and its looks differ by nothing but their line within one function of the program.

    A line that stays is in a loop as well where its main thread computes, and gives up its core again and again.
    """
    is_in_function: bool
    """Whether it may be in a loop, or stands, as far as two looks show: whether numbers only rise takes more."""
    busy_frac: float
    """Cores that it has used between its looks."""
    steps: tuple[str, str]
    """Its first and last step, as `i=54`, of the outermost loop that goes on; empty where no loop shows one."""
    phase: str
    trouble: str

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in a call that needs other ranks."""
        return self.kind in (Kind.WAITS, Kind.JOINS, Kind.DEVICE) and not self.is_moving

    @property
    def is_at_rest(self) -> bool:
        """Whether it does nothing."""
        return not self.is_moving and self.busy_frac < BUSY

    @property
    def seen_s(self) -> float:
        """Seconds for which it is known to have been at its place: by its looks, or as its main thread has not run.

        Who waits for a child wakes now and then; then it is the child that has not run.
        """
        looks = self.rank.looks
        asleep_s = [look.asleep_s or 0.0 for look in (looks[-1], *self.rank.children)]
        own_s, *children_s = asleep_s if self.is_at_rest else (0.0,)
        return max(looks[-1].at_s - looks[0].at_s, own_s, min(children_s, default=0.0))

    @property
    def asleep_s(self) -> float:
        """Seconds for which its main thread has surely waited for other ranks: 0 for one that its GPU may hold up."""
        return (self.rank.looks[-1].asleep_s or 0.0) if self.is_at_rest and self.kind is not Kind.DEVICE else 0.0


class Finding(msgspec.Struct, frozen=True):
    """What the comparison of a job's ranks has found."""

    what: What
    severity: Severity
    culprits: list[Standing]
    waiting: list[list[Standing]]
    """Ranks that wait, by their call, the fewest first; where none waits, the ranks by their line."""
    num_looks: int = 0
    """Looks that would make it sure; 0 where it is, or looking longer does not help."""


def standing_of(rank: SeenRank) -> Standing:
    """Return what a rank's looks show."""
    looks = [look for look in rank.looks if look.state]
    last = rank.looks[-1]
    seconds = max(rank.looks[-1].at_s - rank.looks[0].at_s, 0.1)
    busy_frac = max(0.0, (looks[-1].cpu_s - looks[0].cpu_s) / seconds) if looks else 0.0
    kinds = [_kind_of(look) for look in rank.looks]
    kind, op, place = kinds[-1]
    outer = (_step(rank.looks[0].frames), _step(last.frames))
    steps = (outer if outer[0] != outer[1] else _risen(rank.looks)) or outer
    is_moving = len({_lines(look) for look in looks}) > 1 or steps[0] != steps[1]
    if not last.state or last.state in "ZX":
        kind = Kind.ENDED
    elif last.state == "T" or all(look.state == "t" for look in looks):
        kind, is_moving = Kind.FROZEN, False
    elif last.trouble:
        kind = Kind.UNSEEN
    elif all(look.state == "D" for look in looks):
        kind, is_moving = Kind.BLOCKED, False
    elif last.frames and _in_backward(last.frames):
        # DDP's all-reduce runs under backward, without a frame of its own: a rank that computes there is busy.
        kind, op = (Kind.WAITS, "backward") if busy_frac < BUSY and not is_moving else (Kind.ELSEWHERE, "backward")
    elif kind is Kind.ELSEWHERE and 0 < len(last.frames) < MAX_FRAMES and last.frames[-1].name not in PROGRAM:
        kind = Kind.ENDING
    elif kind is Kind.ELSEWHERE and not op and not is_moving and _may_wait_for_gpu(rank, busy_frac):
        kind = Kind.DEVICE
    is_inside = kind is Kind.ELSEWHERE and outer[0] == outer[1] and _is_one_function(rank.looks)
    if kind in (Kind.ELSEWHERE, Kind.BLOCKED) and _hz(looks, "io_bytes", seconds) > MOVED_BYTES_HZ:
        is_moving, is_inside = True, False
    if kind in (Kind.WAITS, Kind.DEVICE, Kind.ELSEWHERE) and _hz(looks, "switches", seconds) > MAX_SWITCHES_HZ:
        is_moving, is_inside = True, is_inside and _hz(looks, "wanted_s", seconds) > COMPUTES
    is_in_loop = is_inside and is_moving and steps[0] == steps[1]
    phase = next((name for name, files in PHASES if any(files.search(frame.file) for frame in last.frames)), "")
    return Standing(rank, kind, op, place, is_moving, is_in_loop, is_inside, busy_frac, steps, phase, last.trouble)


def _may_wait_for_gpu(rank: SeenRank, busy_frac: float) -> bool:
    """Return whether a rank whose line shows no call may poll its GPU: who does finds a kernel running there."""
    return rank.uses_gpu and busy_frac > SPINS and not (rank.gpu is not None and rank.gpu.is_idle)


def _hz(looks: Sequence[Look], counter: str, seconds: float) -> float:
    """Return how fast a counter has grown from the first to the last look; 0 where it is not known."""
    counts = [getattr(look, counter) for look in looks[:: max(1, len(looks) - 1)]]
    return 0.0 if len(counts) < 2 or None in counts else (counts[-1] - counts[0]) / seconds


def _lines(look: Look) -> tuple[tuple[str, int], ...]:
    return tuple((frame.function, frame.line) for frame in look.frames)


def _is_one_function(looks: Sequence[Look]) -> bool:
    """Return whether looks have shown the same calls, and the innermost one is a function of the program."""
    calls = {(tuple(frame.function for frame in look.frames), _lines(look)[1:]) for look in looks}
    return len(calls) == 1 and not any(LIBRARY.search(look.frames[0].file) for look in looks if look.frames)


def _in_backward(frames: Sequence[SeenFrame]) -> bool:
    return any(frame.name in BACKWARD and LIBRARY.search(frame.file) for frame in frames[:3])


def _kind_of(look: Look) -> tuple[Kind, str, Place | None]:
    own = next((number for number, frame in enumerate(look.frames) if not LIBRARY.search(frame.file)), None)
    inner = look.frames[:own]
    place = None
    if own is not None:
        frame = look.frames[own]
        place = Place(frame.file, frame.line, frame.name)
    names = [frame.name for frame in inner]
    if JOINING & set(names):
        return Kind.JOINS, "init_process_group", place
    calls = [frame for frame in inner if frame.file.endswith(C10D) and not HIDDEN.match(frame.name)]
    if calls:
        peers = {name: value for frame in inner for name, value in frame.numbers.items() if name in PEERS}
        shown = ", ".join(f"{name}={value}" for name, value in sorted(peers.items()))
        return Kind.WAITS, f"{calls[-1].name}({shown})" if shown else calls[-1].name, place
    for name in names:
        if name in DDP_CALLS:
            return Kind.WAITS, DDP_CALLS[name], place
    if names and names[0] in DEVICE_CALLS and "/torch/" in inner[0].file:
        return Kind.DEVICE, names[0], place
    return Kind.ELSEWHERE, names[0] if names else "", place


def _step(frames: Sequence[SeenFrame]) -> str:
    for frame in reversed(frames):
        found = [f"{name}={frame.numbers[name]}" for name in STEP_ORDER if name in frame.numbers]
        if found and not LIBRARY.search(frame.file):
            return " ".join(found)
    return ""


def _risen(looks: Sequence[Look]) -> tuple[str, str] | None:
    """Return from where to where the outermost step number has risen; None where none has.

    One that falls as well may be that of a short loop within one without an end. Some looks show something else, since
    nothing pauses the rank: they may read an integer that has just been freed.
    """
    for frames in zip(*(reversed(look.frames) for look in looks), strict=False):
        for name in STEP_ORDER if not LIBRARY.search(frames[0].file) else ():
            values = [frame.numbers[name] for frame in frames if name in frame.numbers]
            rise = values if values == sorted(values) else _longest_rise(values)
            if len(rise) >= max(2.0, RISES * len(looks)) and rise[0] < rise[-1]:
                return f"{name}={rise[0]}", f"{name}={rise[-1]}"
    return None


def _longest_rise(values: Sequence[int]) -> list[int]:
    """Return the most values of which each is larger than the one before, in their order."""
    rises: list[list[int]] = []
    for value in values:
        rises.append([*max((rise for rise in rises if rise[-1] < value), key=len, default=[]), value])
    return max(rises, key=len)


def finding_of(job: SeenJob, standings: Sequence[Standing], behind: Container[int] = ()) -> Finding:
    """Return who holds up whom, or that nobody does.

    Args:
        job: The job.
        standings: Its ranks.
        behind: Ranks of which NCCL knows that they have launched fewer collectives than others.
    """
    by_call = _by_call(one for one in standings if one.is_waiting)
    frozen = [one for one in standings if one.kind is Kind.FROZEN]
    ended = [one for one in standings if one.kind is Kind.ENDED]
    unseen = [one for one in standings if one.kind is Kind.UNSEEN]
    others = [one for one in standings if not (one.is_waiting or one in frozen or one in ended or one in unseen)]
    late = [one for group in by_call for one in group if one.kind is Kind.DEVICE and one.rank.rank in behind]
    if frozen:
        return Finding(What.FROZEN, Severity.CRITICAL, frozen, by_call)
    if by_call and others:
        return _elsewhere(others, by_call)
    if unseen:
        return Finding(What.UNSEEN, Severity.WARNING, unseen, by_call)
    if by_call and (job.missing or ended):
        return Finding(What.MISSING, Severity.CRITICAL if ended else Severity.WARNING, ended, by_call)
    if late:
        rest = _by_call(one for group in by_call for one in group if one not in late)
        return _found(What.ELSEWHERE, SURE_ON_GPU_S, late, rest)
    if by_call:
        return _all_wait(job, by_call)
    return _none_waits(job, others)


def _found(
    what: What, sure_s: float, culprits: list[Standing], waiting: list[list[Standing]], *, may_alarm: bool = True
) -> Finding:
    """Return a finding that is an alarm once its ranks were seen for long enough.

    Args:
        what: What has been found.
        sure_s: Seconds from which it is sure; infinite where it never is.
        culprits: See `Finding`.
        waiting: See `Finding`.
        may_alarm: False where looking longer does not help either.
    """
    seen_s = min(one.seen_s for one in culprits or [one for group in waiting for one in group])
    if not may_alarm or sure_s == math.inf:
        return Finding(what, Severity.WARNING, culprits, waiting)
    if seen_s >= sure_s:
        return Finding(what, Severity.CRITICAL, culprits, waiting)
    return Finding(what, Severity.WARNING, culprits, waiting, math.ceil(sure_s) + SPARE_LOOKS)


def _elsewhere(others: list[Standing], by_call: list[list[Standing]]) -> Finding:
    """Return who keeps away from the call in which others wait: those at rest, else those that stand and compute.

    Where all of them move, they are an alarm once each runs within one function and the others have waited long.
    """
    is_joining = all(one.kind is Kind.JOINS for group in by_call for one in group)
    is_starting = is_joining and all(one.rank.age_s < START_S for one in others)
    standing = [one for one in others if not one.is_moving]
    culprits = [one for one in standing if one.is_at_rest] or standing or others
    sure_s = SURE_S if standing else math.inf
    waited_s = min(one.asleep_s for group in by_call for one in group)
    if waited_s > 0.0 and not standing and all(one.is_in_loop for one in others):
        # Looks, a second apart, would show ranks at one place that come there again in each step.
        sure_s = max(SURE_S, min(one.seen_s for one in others) + SURE_LOOP_S - waited_s)
    return _found(What.ELSEWHERE, sure_s, culprits, by_call, may_alarm=not is_starting)


def _all_wait(job: SeenJob, by_call: list[list[Standing]]) -> Finding:
    is_on_gpu = any(one.kind is Kind.DEVICE for group in by_call for one in group)
    if len(by_call) == 1:
        sure_s = SURE_ON_GPU_S if is_on_gpu else SURE_S
        return _found(What.SAME_CALL, sure_s, [], by_call, may_alarm=job.size > 1)
    smallest = [group for group in by_call if len(group) == len(by_call[0])]
    is_one_call = len({group[0].op.partition("(")[0] for group in by_call}) == 1
    # Of three sides of one size each is as likely to be right; with one call, each rank waits for the next.
    is_known = is_one_call or len(smallest) < max(3, len(by_call))
    fewest = [one for group in smallest for one in group] if is_known else []
    return _found(What.MISMATCH, SURE_ON_GPU_S if is_on_gpu else SURE_S, fewest, by_call)


def _none_waits(job: SeenJob, ranks: list[Standing]) -> Finding:
    at_rest = [one for one in ranks if one.is_at_rest]
    if ending := [one for one in at_rest if one.kind is Kind.ENDING]:
        return _found(What.NOT_EXITING, SURE_S, ending, [])
    if not at_rest:
        return Finding(What.MOVING, Severity.OK, [], [])
    places = _by_place(ranks)
    busy = [one for one in ranks if one not in at_rest]
    if busy:
        fewest = min(at_rest, busy, key=len) if len(at_rest) != len(busy) else []
        sure_s = math.inf if any(one.is_moving for one in busy) else SURE_S
        return _found(What.STANDING, sure_s, fewest, places)
    fewest = places[0] if len(places[0]) < len(places[-1]) else []
    return _found(What.STANDSTILL, SURE_S, fewest, places, may_alarm=job.size > 1)


def _by_call(waiting: Iterable[Standing]) -> list[list[Standing]]:
    groups: dict[tuple[str, str], list[Standing]] = defaultdict(list)
    for one in waiting:
        line = f"{one.place}" if one.op in ("", "backward") else ""
        groups[one.op, line].append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank.rank))


def _by_place(standings: Iterable[Standing]) -> list[list[Standing]]:
    groups: dict[Place | None, list[Standing]] = defaultdict(list)
    for one in standings:
        groups[one.place].append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank.rank))
