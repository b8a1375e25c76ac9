"""Folds what the probe sees into a RankReport: where the rank stands in each process group, since when, at which line.

Pure: time is an argument. Two sources show collectives, and each lies in its own way (Source: torch 2.13,
ProcessGroupGloo and FlightRecorder):

- Counters are cheap and taken at every sample, but count send, receive and monitored_barrier too, by amounts that
  depend on the rank, and `completed` trails and may step back. They show that something moves, and that something is
  pending; the second only once two samples agree.
- A full dump costs 200 times as much and holds the one number that ranks can compare, `collective_seq_id`. It is wanted
  when a rank or a pending operation has been quiet for two samples, once per position: then a waiting rank learns what
  it waits in, and a missing rank how far it had come. A slow tick keeps the numbers fresh while all goes well.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ddpcore.probe.gpu import NCCL, GpuTransfers, GpuWaits, first_open, with_batches
from ddpcore.probe.group_track import GroupTrack, name_in_reports, operation
from ddpcore.probe.progress import Standing
from ddpcore.probe.reporting import SLOW_TICK_S
from ddpcore.probe.samples import MAX_COUNT, to_count
from ddpcore.probe.stack import sendable
from ddpcore.wire import (
    DEFAULT_GROUP,
    ONE_WAY_OPS,
    WIRE_VERSION,
    ArrivalsReport,
    GroupReport,
    Phase,
    RankReport,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpcore.probe.samples import (
        BarrierMark,
        CallArguments,
        CounterKey,
        Counters,
        GroupMembers,
        RecorderDump,
        RecorderEntry,
        Sample,
        StepEnd,
        StepMark,
    )

QUIET_SAMPLES = 2
"""Samples that must agree before a position counts as quiet, or an unfinished operation as a wait."""

RESTING_SAMPLES = 5
"""Samples after which a quiet group's position is read while the rank moves on in another and has nothing pending here:
a group that is used every few steps would cost a dump each time."""

MAX_ARRIVALS = 64
"""Latest calls in a report, over all groups."""

ARRIVALS_REPORTS = 4
"""Reports in a row with the same calls: one of them arrives."""

MIN_DUMP_INTERVAL_S = 0.2
MAX_DUMP_FRAC = 0.001
"""Part of a core that full dumps may take (tests/bench/bench_probe_cost.py), but for the two kinds that do not wait
for it: the one that ends the start, and one in each wait of `LONG_WAIT_S`."""
LONG_WAIT_S = 0.4
"""Seconds in one call from which a dump is made at any time: the rank has nothing else to do, and without it would be
missing in the call that it waits in."""

MAX_GAP_S = 1.0
"""Gap in seconds between samples beyond which the process was frozen: it counts as neither work nor wait."""

MAX_GROUPS = 32
MAX_MEMBERS = 4096
"""Bounds of a report, so that it fits into a datagram: groups, and members named over all of them."""

_MAX_LABEL_CHARS = 256


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    job_id: str
    attempt: int
    is_adopted: bool = False


class _State(NamedTuple):
    """State of a rank at its last sample."""

    phase: Phase = Phase.STARTING
    is_waiting: bool = False
    is_overlapped: bool = False
    """It worked while a collective was under way."""


STEP_PHASES = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BARRIER, Phase.OTHER})
"""Phases within a step: none lasts beyond its end."""


class RankState:
    """State of one rank, as far as its probe can see.

    Each tick: `observe`, then `learn` if `wants_dump`, then `report`. `recorder_missing`: this torch has no usable
    flight recorder.
    """

    def __init__(self, identity: RankIdentity, *, recorder_missing: bool = False) -> None:
        self.identity = identity
        """It changes where torch has another one once the group is open."""
        self._recorder_missing = recorder_missing
        self._tracks: dict[CounterKey, GroupTrack] = {}
        self._past_keys: set[CounterKey] = set()
        """Groups that were destroyed before the present default group was made."""
        self._has_reopened = False
        self._members: Mapping[str, GroupMembers] = {}
        self._transfers = GpuTransfers()
        self._gpu_waits = GpuWaits()
        self._labels: dict[CounterKey, tuple[str, list[int]]] = {}
        """Name and ranks of each group in reports, as of the last full dump."""
        self._sample: Sample | None = None
        self._phase = Phase.STARTING
        self._phase_since_s = 0.0
        self._has_started = False
        self._open: BarrierMark | None = None
        """The named barrier at which the last sample saw the main thread wait."""
        self._barrier_samples = 0
        self._observed_s = 0.0
        self._waited_s = 0.0
        self._overlapped_s = 0.0
        self._state = _State()
        self._worked_s = dict.fromkeys(Phase, 0.0)
        self._report_seq = 0
        self._dumped_s = -1.0
        self._next_dump_s = 0.0
        self._dumped_tick = -1
        self._has_dumped_steps = False
        self._tick = 0
        self._arrivals: list[ArrivalsReport] = []
        self._num_arrivals_sent = 0
        self._step_ends_us: list[int] = []
        self._standing = Standing()

    @property
    def is_waiting(self) -> bool:
        """True while the rank is known to wait in a collective or a named barrier."""
        return self._barrier_samples >= QUIET_SAMPLES or any(track.is_waiting for track in self._tracks.values())

    @property
    def has_groups(self) -> bool:
        """True once a collective has been recorded."""
        return bool(self._tracks)

    @property
    def is_pending(self) -> bool:
        """True when the last sample saw a collective or a named barrier called and not over."""
        return self._barrier_samples > 0 or any(track.is_pending for track in self._tracks.values())

    @property
    def _is_held_up(self) -> bool:
        return self._barrier_samples > 0 or any(track.is_held_up for track in self._tracks.values())

    def is_still(self, now_s: float) -> bool:
        """Return whether the rank has made no step for a while, and does not wait in a collective either."""
        return self._standing.is_still(now_s) and not self.is_waiting

    def has_stepped(self, step: StepMark | None) -> bool:
        """Return whether the program has made a step since the last sample: it does not wait any more."""
        return self._sample is not None and step is not self._sample.step

    def still_pends(self, counters: Counters, marks: Sequence[BarrierMark | None]) -> bool:
        """Return whether anything that the last sample saw pending has not moved since."""
        return (self._open is not None and self._open in marks) or any(
            track.is_pending and track.counters == counters.get(key) for key, track in self._tracks.items()
        )

    def observe(self, sample: Sample) -> None:
        """Take one tick's sample; samples come in the order of their time."""
        previous, self._sample = self._sample, sample
        now_s = sample.now_s
        if previous is not None and (
            sample.num_openings > max(previous.num_openings, 1) or sample.num_worlds > max(previous.num_worlds, 1)
        ):
            self._reset()
        for key, (enqueued, completed) in sample.counters.items():
            if key in self._past_keys:
                continue
            track = self._tracks.get(key)
            if track is None:
                track = self._tracks[key] = GroupTrack(is_in_order=key[0] == NCCL)
            track.observe(enqueued, completed, now_s)
        self._count_barrier(sample.open_mark)
        # A program that trains without a process group has started too.
        self._has_started = self._has_started or sample.has_process_group or sample.step is not None
        phase = self._judge_phase(sample)
        # Samples of fast steps may all come upon one phase: after a step it is another one of the same kind.
        is_next = previous is not None and phase in STEP_PHASES and sample.step != previous.step
        if previous is None or phase is not self._phase or is_next:
            self._phase, self._phase_since_s = phase, now_s
        is_pending = self.is_pending and not sample.is_at_work
        is_held_up = self._is_held_up and not sample.is_at_work
        is_shadowing = sample.reading.is_shadowing
        before = self._state
        self._state = _State(phase, is_held_up and not is_shadowing, sample.is_at_work and not is_shadowing)
        if previous is not None:
            # Whatever changed did so somewhere between the two samples: each of them stands for half of the gap.
            half_s = min(max(now_s - previous.now_s, 0.0), MAX_GAP_S) / 2
            self._count_time(before, half_s)
            self._count_time(self._state, half_s)
        has_moved = any(track.quiet_samples == 1 for track in self._tracks.values())
        self._standing.observe(sample, has_moved=has_moved, is_pending=is_pending, is_held_up=is_held_up)

    @property
    def _has_left_start(self) -> bool:
        """True from the first step to the first dump since: what the start has called last is out of date."""
        return self._sample is not None and self._sample.has_steps and not self._has_dumped_steps

    def wants_dump(self, now_s: float) -> bool:
        """Return whether a full dump of the recorder is worth its cost now."""
        if self._sample is None or not (self._tracks or self._has_reopened):
            return False
        if self._has_left_start or self._has_waited(now_s):
            return True
        if now_s < self._next_dump_s:
            return False
        is_idle = all(track.quiet_samples >= QUIET_SAMPLES for track in self._tracks.values())
        return self._sample.tick != self._dumped_tick or any(
            not track.is_dumped
            and track.quiet_samples >= (QUIET_SAMPLES if is_idle or track.is_pending else RESTING_SAMPLES)
            for track in self._tracks.values()
        )

    def learn(
        self,
        dump: RecorderDump,
        members: Mapping[str, GroupMembers],
        cost_s: float = 0.0,
        step_ends: Sequence[StepEnd] = (),
    ) -> None:
        """Take a full dump of the recorder, made right after the last sample.

        `cost_s` is its CPU time; the next one waits accordingly, at most a slow tick, but not for the one that ends the
        start. `step_ends` are when the latest steps were over.
        """
        now_s, tick = (self._sample.now_s, self._sample.tick) if self._sample else (0.0, -1)
        self._dumped_s, self._members = now_s, members
        if not self._has_left_start:
            self._next_dump_s = now_s + min(max(cost_s / MAX_DUMP_FRAC, MIN_DUMP_INTERVAL_S), SLOW_TICK_S)
        by_key: dict[CounterKey, list[RecorderEntry]] = {}
        entries = with_batches(dump.entries)
        for entry in entries:
            if not entry.is_p2p and 1 <= entry.seq <= MAX_COUNT:
                by_key.setdefault(entry.key, []).append(entry)
        first = first_open(entries)
        for key, track in self._tracks.items():
            track.learn(by_key.get(key, ()), dump.counters.get(key), step_ends, first)
        if self._sample is not None:
            self._has_dumped_steps = self._sample.has_steps
            moved_s = max((track.changed_s for key, track in self._tracks.items() if key[0] == NCCL), default=0.0)
            self._transfers.learn(entries, dump.counters, self._sample.peer_calls, members, moved_s)
        self._labels = {
            key: (self._report_name(key, track), self._other_members(track.group))
            for key, track in self._tracks.items()
            if track.group in members or track.group == DEFAULT_GROUP
        }
        if tick != self._dumped_tick:
            self._gpu_waits.learn(entries, now_s)
            self._dumped_tick = self._tick = tick
            self._arrivals, self._num_arrivals_sent = self._read_arrivals(by_key), 0
            self._step_ends_us = [end.at_us for end in step_ends][-MAX_ARRIVALS:]

    def _has_waited(self, now_s: float) -> bool:
        """Return whether the rank has been in a call for long that no dump has shown."""
        since_s = [one.changed_s for one in self._tracks.values() if one.is_pending and not one.is_dumped]
        return any(now_s - one_s >= LONG_WAIT_S and self._dumped_s <= one_s for one_s in since_s)

    @property
    def wants_arguments(self) -> bool:
        """True while the rank waits in a collective whose arguments have not been looked for."""
        return any(track.is_waiting and not track.has_arguments for track in self._tracks.values())

    def learn_arguments(self, arguments: CallArguments | None) -> None:
        """Take the arguments of the collective that the main thread waits in; None where it stands elsewhere."""
        waiting = [track for track in self._tracks.values() if track.is_waiting and not track.has_arguments]
        alike = [track for track in waiting if arguments is not None and track.op == arguments.op]
        for track in waiting:
            # Of two groups that wait in the same operation nobody can say which one the main thread has called last.
            if arguments is not None and alike == [track]:
                track.learn_arguments(self._root_of(track.group, arguments), arguments.reduce_op)
            else:
                track.learn_arguments(None, "")

    def _root_of(self, group: str, arguments: CallArguments) -> int | None:
        members = self._members.get(group)
        ranks = members.ranks if members is not None else tuple(range(self.identity.world_size))
        at = arguments.group_root
        root = ranks[at] if arguments.root is None and at is not None and 0 <= at < len(ranks) else arguments.root
        return root if root is not None and root in ranks else None

    def report(self, *, probe_cpu_s: float = 0.0, answered_request_id: int = 0, is_ending: bool = False) -> RankReport:
        """Return the rank's state at the last sample; raise RuntimeError before the first."""
        sample = self._sample
        if sample is None:
            raise RuntimeError("a report needs a sample")
        self._report_seq += 1
        self._num_arrivals_sent += 1
        identity, step = self.identity, sample.step
        is_compared = self._num_arrivals_sent <= ARRIVALS_REPORTS and not sample.reading.is_shadowing
        return RankReport(
            wire_version=WIRE_VERSION,
            rank=identity.rank,
            local_rank=identity.local_rank,
            world_size=identity.world_size,
            pid=identity.pid,
            job_id=identity.job_id,
            attempt=identity.attempt,
            is_adopted=identity.is_adopted,
            report_seq=self._report_seq,
            phase=self._phase if sample.uncaught is None else sample.uncaught.phase,
            phase_s=max(0.0, sample.now_s - self._phase_since_s),
            place=sample.reading.place if sample.uncaught is None else sample.uncaught.place,
            raised="" if sample.uncaught is None else sample.uncaught.text,
            step=to_count(step.step) if step else None,
            epoch=to_count(step.epoch) if step else None,
            loss=step.loss if step else None,
            loss_step=to_count(step.loss_step) if step else None,
            loss_first=step.loss_first if step else None,
            steps_done=step.steps_done if step else 0,
            is_step_counted=step.is_counted if step else False,
            groups=self._group_reports(sample),
            observed_s=self._observed_s,
            waited_s=self._waited_s,
            worked_s=list(self._worked_s.values()),
            overlapped_s=self._overlapped_s,
            probe_cpu_s=probe_cpu_s,
            slow_factor=sample.slow_factor,
            answered_request_id=answered_request_id,
            recorder_missing=self._recorder_missing,
            is_ending=is_ending,
            can_stop=sample.can_stop,
            training=None if sample.training is None else sample.training.report(sample.now_s),
            gpu_memory=list(sample.gpu_memory),
            anomalies=list(sample.anomalies),
            has_open_transfers=self._transfers.has_open,
            **self._standing.report(sample, self._transfers.wait(sample.now_s, sample.counters)),
            tick=max(0, self._tick),
            arrivals=self._arrivals if is_compared else [],
            step_ends_us=self._step_ends_us if is_compared else [],
        )

    def validate(self) -> None:
        """Assert what holds after every step."""
        assert 0.0 <= self._waited_s <= self._observed_s
        assert 0.0 <= self._overlapped_s <= self._observed_s
        assert abs(self._waited_s + sum(self._worked_s.values()) - self._observed_s) < 1e-6 * (1 + self._observed_s)
        for track in self._tracks.values():
            track.validate()
        if self._sample is not None:
            assert self._phase_since_s <= self._sample.now_s
            for group in self._group_reports(self._sample):
                assert 0 <= group.completed_seq <= group.enqueued_seq
                assert not group.is_waiting or group.completed_seq < group.enqueued_seq
                assert group.ranks == sorted(group.ranks)

    def _reset(self) -> None:
        """Forget the groups of a default group that has been destroyed: the new ones have their names, and a new count.

        Reports hold an idle default group until its next call, or the others' first wait would seem to be behind it.
        """
        self._past_keys |= self._tracks.keys()
        self._tracks.clear()
        self._members = {}
        self._labels = {}
        self._has_reopened = True
        self._has_dumped_steps = False
        self._dumped_tick = -1

    def _count_time(self, state: _State, for_s: float) -> None:
        self._observed_s += for_s
        waited_s = for_s if state.is_waiting else for_s * self._gpu_waits.frac
        self._waited_s += waited_s
        for_s -= waited_s
        self._worked_s[state.phase] += for_s
        if state.is_overlapped:
            self._overlapped_s += for_s

    def _count_barrier(self, barrier: BarrierMark | None) -> None:
        previous, self._open = self._open, barrier
        if barrier is None:
            self._barrier_samples = 0
        elif previous is not None and (previous.group, previous.seq) == (barrier.group, barrier.seq):
            self._barrier_samples += 1
        else:
            self._barrier_samples = 1

    def _judge_phase(self, sample: Sample) -> Phase:
        seen = sample.reading.phase
        if self._open is not None:
            return Phase.BARRIER
        if seen in (Phase.BARRIER, Phase.JOINING):
            return seen
        is_in_call = any(track.is_in_call for track in self._tracks.values())
        if seen is Phase.OTHER and is_in_call:
            # Work.wait() has no frame of its own: the program stands at its own line, in a collective.
            return Phase.BARRIER
        if seen is Phase.OTHER and sample.main.peer_wait is not None:
            return Phase.BARRIER
        if sample.phases:
            return sample.phases[-1]
        return seen if self._has_started else Phase.STARTING

    def _group_reports(self, sample: Sample) -> list[GroupReport]:
        """Return the groups: the default one first, waiting ones before quiet ones, the named barriers last."""
        named: dict[str, tuple[GroupTrack, list[int]]] = {}
        for key, (name, ranks) in self._labels.items():
            track = self._tracks[key]
            # A group that was destroyed and made again has the old name: the younger one stands for it.
            if name not in named or track.changed_s >= named[name][0].changed_s:
                named[name] = track, ranks
        order = list(named)
        if len(order) > 1:
            order.sort(key=lambda name: (name != DEFAULT_GROUP, not named[name][0].is_waiting, name))
        reports: list[GroupReport] = []
        if self._has_reopened and DEFAULT_GROUP not in named and sample.has_process_group:
            reports.append(GroupReport(group=DEFAULT_GROUP))
        num_members = 0
        for name in order[:MAX_GROUPS]:
            track, ranks = named[name]
            if num_members + len(ranks) <= MAX_MEMBERS:
                num_members += len(ranks)
                reports.append(track.report(name, ranks, sample.now_s))
        return reports + [self._barrier_report(mark, sample.now_s) for mark in sample.marks]

    def _read_arrivals(self, by_key: Mapping[CounterKey, Sequence[RecorderEntry]]) -> list[ArrivalsReport]:
        """Return the times of the latest calls, each group's in the order of its seqs."""
        named = {
            self._report_name(key, track): by_key.get(key, ())
            for key, track in self._tracks.items()
            if track.group in self._members
        }
        latest = sorted((entry.called_us for entries in named.values() for entry in entries), reverse=True)
        oldest_us = latest[MAX_ARRIVALS] if len(latest) > MAX_ARRIVALS else 0
        by_name = {
            name: sorted((entry for entry in entries if entry.called_us > oldest_us), key=attrgetter("seq"))
            for name, entries in named.items()
        }
        return [
            ArrivalsReport(
                name,
                seqs=[call.seq for call in calls],
                called_us=[call.called_us for call in calls],
                one_way_seqs=[call.seq for call in calls if operation(call) in ONE_WAY_OPS],
                on_gpu_us=[call.on_gpu_us for call in calls] if any(call.on_gpu_us >= 0 for call in calls) else [],
            )
            for name, calls in by_name.items()
            if calls
        ]

    def _report_name(self, key: CounterKey, track: GroupTrack) -> str:
        members = self._members.get(track.group)
        is_apart = members is not None and members.is_mixed and key[0] == "nccl"
        return name_in_reports(track.group, self._sample.num_worlds if self._sample else 0, is_apart=is_apart)

    def _other_members(self, group: str) -> list[int]:
        members = self._members.get(group)
        if members is None or len(members.ranks) == self.identity.world_size:
            return []
        return list(members.ranks)

    def _barrier_report(self, barrier: BarrierMark, now_s: float) -> GroupReport:
        is_open = not barrier.is_over
        return GroupReport(
            group=sendable(barrier.group, _MAX_LABEL_CHARS),
            enqueued_seq=barrier.seq,
            completed_seq=barrier.seq - 1 if is_open else barrier.seq,
            op="barrier",
            label=sendable(barrier.label, _MAX_LABEL_CHARS),
            waiting_s=max(0.0, now_s - barrier.entered_s) if is_open else 0.0,
            is_waiting=is_open and self._barrier_samples >= QUIET_SAMPLES,
            ranks=list(barrier.ranks),
        )
