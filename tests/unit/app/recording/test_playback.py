"""What is played again is what was seen: the same verdicts at the same moments, from any moment on."""

from __future__ import annotations

import msgspec
import pytest

from agent.wire.logs import LogLine
from agent.wire.reports import encode_node_report
from app.diagnosis.causes import Cause
from app.diagnosis.rank_facts import Thresholds
from app.errors import AppError
from app.recording.playback import Playback, clock_text, from_its_job_on
from app.recording.records import LinesRecord, NoticeRecord, Record, Recording, ReportRecord, StacksRecord
from app.recording.replay import Replay
from app.view.summary import status_object
from ddpcore.wire import Fault, FaultKind
from tests.support.node_reports import job_status, node_report
from tests.support.recordings import frozen_recording, opening, recording_of
from tests.support.sim import SimCluster


class Watch:
    """A clock that a test moves; each look at it takes no time."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def played(seconds: float, replay: Replay, watch: Watch) -> None:
    for _ in range(round(seconds / 0.1)):
        watch.now_s += 0.1
        replay.view()


def position_s(replay: Replay) -> str:
    return replay.title.split()[1].partition("/")[0]


def test_the_same_verdict_comes_at_the_same_moment_with_the_same_words() -> None:
    sim = SimCluster(noise=0.1, seed=3)
    sim.freeze(2, at_step=30)
    sim.run_until(lambda: bool(sim.verdicts()), 30, "a verdict")
    named_s = sim.now_s - sim.heard[0][0]
    sim.run(3)

    playback = Playback(recording_of(sim), Thresholds())
    while not playback.verdicts:
        playback.step(playback.length_s)

    assert playback.at_s == pytest.approx(named_s, abs=0.5)
    while not playback.is_over:
        playback.step(playback.length_s)
    live, again = status_object(sim.view()), status_object(playback.view())
    assert [row["culprits"] for row in again["verdicts"]] == [row["culprits"] for row in live["verdicts"]] == [[2]]
    assert [row["state"] for row in again["ranks"]] == [row["state"] for row in live["ranks"]]
    assert again["jobs"][0]["step"] == live["jobs"][0]["step"]


def of_two_jobs() -> Recording:
    """Return the evidence of job `demo`, before which job `before` ran on one of the nodes; it still runs."""
    before = job_status(job_id="before", world_size=2, num_nodes=1, age_s=600.0)
    own = [job_status(first_rank=first, job_id="demo", age_s=1.0) for first in (0, 2)]
    records: list[Record] = [LinesRecord(3.0, "demo-0", [LogLine(1, 0, "stdout", "not its own", "before")])]
    for tick in range(100):
        for number, node in enumerate(("demo-0", "demo-1")):
            jobs = [before] * (number == 0) + [own[number]] * (tick >= 60)
            frame = encode_node_report(node_report(tick + 1, jobs, []))
            records.append(ReportRecord(tick * 0.2, node, frame))
    records.sort(key=lambda record: record.at_s)
    return Recording(opening("demo-0", "demo-1"), records, is_cut=False)


def test_evidence_is_played_from_its_own_job_on_and_offers_no_command_of_a_live_one() -> None:
    watch, whole = Watch(), of_two_jobs()
    recording = from_its_job_on(whole)
    assert recording.length_s == pytest.approx(whole.length_s - 12.0)
    assert clock_text(recording, 0.0) == clock_text(whole, 12.0)
    assert from_its_job_on(recording) == recording

    replay = Replay(recording, clock=watch)
    replay.view()
    watch.now_s += 0.1
    view = replay.view()

    assert view.job_id == "demo"
    assert "waiting for the agent" not in view.headline().text
    assert view.other_jobs_text == "job demo is shown; also on these nodes: job before, starting"
    assert view.company_texts == ["also on these nodes: job before, starting"]
    assert replay.drain_logs() == []


def test_a_recording_of_no_certain_job_is_played_whole() -> None:
    whole = of_two_jobs()
    whole = msgspec.structs.replace(whole, opening=msgspec.structs.replace(whole.opening, job_id=""))
    assert from_its_job_on(whole) is whole
    assert from_its_job_on(frozen_recording()) is frozen_recording()


def test_reports_that_cannot_be_decoded_are_counted_and_the_rest_is_played() -> None:
    sim = SimCluster()
    sim.run(8)
    playback = Playback(recording_of(sim, ReportRecord(2.0, "demo-0", b"nonsense")), Thresholds())

    while not playback.is_over:
        playback.step(playback.length_s)

    assert playback.num_malformed == 1
    assert playback.view().num_ranks == 4


def test_reports_that_cannot_be_decoded_are_told_of_in_the_end() -> None:
    sim = SimCluster()
    sim.run(8)
    for num_odd, told in (
        (0, ""),
        (1, "rankdeck: 1 report in the recording could not be read"),
        (2, "rankdeck: 2 reports in the recording could not be read"),
    ):
        replay = Replay(recording_of(sim, *[ReportRecord(2.0, "demo-0", b"nonsense")] * num_odd))
        for _ in replay.play_to_end():
            pass
        assert replay.farewell() == told


def test_it_goes_at_its_speed_stands_still_when_told_and_stays_at_the_end() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), clock=watch)
    replay.view()
    played(3.0, replay, watch)
    assert position_s(replay) == "0:03"

    replay.pause()
    played(5.0, replay, watch)
    assert position_s(replay) == "0:03"
    assert replay.title.endswith("paused")

    replay.pause()
    replay.change_speed(+1)
    played(2.0, replay, watch)
    assert position_s(replay) == "0:07"
    assert replay.title.endswith("x2")

    replay.change_speed(+99)
    played(10.0, replay, watch)
    assert replay.title.endswith("the end x64")
    replay.pause()
    replay.change_speed(-99)
    played(1.0, replay, watch)
    assert (position_s(replay), replay.num_rewinds) == ("0:00", 1)


def test_one_goes_on_and_back_in_it() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), start_s=6.0, clock=watch)
    replay.pause()
    replay.view()
    assert position_s(replay) == "0:06"

    replay.skip(5.0)
    replay.skip(2.0)
    replay.view()
    assert (position_s(replay), replay.num_rewinds) == ("0:13", 0)

    replay.skip(-10.0)
    replay.view()
    assert (position_s(replay), replay.num_rewinds) == ("0:03", 1)
    replay.skip(-10.0)
    replay.view()
    assert position_s(replay) == "0:00"
    replay.skip(1e6)
    replay.view()
    assert replay.title.endswith("the end")


def test_the_next_verdict_is_where_it_stands_still() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), clock=watch)

    replay.to_next_verdict()
    view = replay.view()

    assert [row.cause for row in view.verdicts()] == [Cause.FROZEN]
    at = replay.title
    played(3.0, replay, watch)
    assert replay.title == at

    replay.to_next_verdict()
    replay.view()
    assert replay.title.endswith("the end"), "nothing else is said in it"


def test_going_back_twice_goes_back_twice_as_far_and_a_search_begins_where_that_ends() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), start_s=frozen_recording().length_s, clock=watch)
    replay.view()

    replay.skip(-2.0)
    replay.skip(-2.0)
    replay.pause()
    replay.view()

    end_s = int(frozen_recording().length_s)
    assert position_s(replay) == f"0:{end_s - 4:02}"
    replay.skip(-1.0)
    replay.to_next_verdict()
    replay.view()
    assert replay.title.endswith("the end"), "the freeze is before that, and has been said"


def test_a_verdict_that_comes_again_is_found_again() -> None:
    sim = SimCluster()
    sim.freeze(2, at_step=30)
    sim.run_until(lambda: bool(sim.verdicts()), 30, "it is frozen")
    sim.run(2)
    sim.thaw(2)
    sim.run_until(lambda: not sim.causes(), 20, "it goes on")
    sim.run(3)
    sim.freeze(2)
    sim.run_until(lambda: bool(sim.causes()), 30, "it is frozen again")
    sim.run(2)
    recording, watch = recording_of(sim), Watch()

    replay = Replay(recording, clock=watch)
    replay.to_next_verdict()
    first = replay.view()
    at_first = replay.title
    replay.to_next_verdict()
    second = replay.view()

    assert first.verdicts()
    assert second.verdicts()
    assert replay.title not in {at_first, "the end"}
    assert "the end" not in replay.title
    assert sum("frozen" in text for _, text in Replay(recording).play_to_end()) == 2


def test_evidence_that_is_played_to_its_end_stays_there() -> None:
    known = frozen_recording()
    why = "rank 2 on demo-1 is frozen (SIGSTOP) for 1.2 s"
    replay = Replay(msgspec.structs.replace(known, opening=msgspec.structs.replace(known.opening, why=why)))
    list(replay.play_to_end())

    assert replay.view().verdicts()
    assert not replay.is_behind
    assert replay.title.endswith(" the end")


async def test_what_a_recording_says_is_no_terminal_escape() -> None:
    hostile = "\x1b]52;c;eA==\x07"
    sim = SimCluster()
    sim.run(2)
    replay = Replay(recording_of(sim, NoticeRecord(1.0, hostile), StacksRecord(1.0, "demo-0", None, hostile)))
    told = list(replay.play_to_end())

    assert told
    assert "\x1b" not in str([text for _, text in told])
    assert "\x1b" not in "".join(answer.trouble for answer in await replay.stacks(is_native=False))


def test_a_frame_that_has_no_time_left_goes_on_in_the_next() -> None:
    class Slow(Watch):
        def __call__(self) -> float:
            self.now_s += 0.03
            return self.now_s

    replay = Replay(frozen_recording(), clock=Slow())
    replay.skip(12.0)
    replay.view()
    assert replay.title.endswith("seeking")
    for _ in range(60):
        replay.view()
    assert not replay.title.endswith("seeking")


async def test_the_stacks_are_the_newest_by_then_or_the_next_that_were_taken() -> None:
    replay = Replay(frozen_recording())
    note, *later = await replay.stacks(is_native=False)
    assert (note.stacks, note.trouble.startswith("taken ")) == (None, True)

    list(replay.play_to_end())
    answers = await replay.stacks(is_native=True)

    assert [answer.node for answer in answers] == [answer.node for answer in later] == ["demo-0", "demo-1"]


async def test_a_recording_without_stacks_says_so() -> None:
    sim = SimCluster()
    sim.run(2)
    with pytest.raises(AppError, match="no stacks were taken in this recording"):
        await Replay(recording_of(sim)).stacks(is_native=False)


def test_a_moment_has_its_time_of_the_clock_where_the_recording_tells() -> None:
    assert clock_text(frozen_recording(), frozen_recording().length_s) == "03:12:45Z"
    assert clock_text(frozen_recording(), frozen_recording().length_s - 46) == "03:11:59Z"
    for made_at in ("", "yesterday", "0001-01-01T00:00:00Z"):
        odd = Recording(
            msgspec.structs.replace(frozen_recording().opening, made_at=made_at),
            frozen_recording().records,
            is_cut=False,
        )
        assert clock_text(odd, 0.0) == ""


async def test_nothing_can_be_done_to_what_is_over() -> None:
    replay = Replay(frozen_recording())
    assert not replay.can_inject
    with pytest.raises(AppError, match="rank 2 is in a recording"):
        await replay.inject(Fault(FaultKind.KILL, 2))


def test_what_is_said_is_told_with_its_second_once() -> None:
    told = list(Replay(frozen_recording()).play_to_end())

    assert told[0][1] == "agents demo-0 and demo-1 are up"
    assert sum(text.startswith("rank 2 on demo-1 is frozen") for _, text in told) == 1
    assert told == sorted(told, key=lambda one: one[0])


def test_lines_and_notices_come_when_they_came() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), clock=watch)
    replay.view()
    assert replay.drain_logs() == []
    played(5.0, replay, watch)
    assert [line.text for _, line in replay.drain_logs()] == ["step 1 loss 5.3", "W torchrun"]
    assert replay.drain_notices() == ["agents demo-0 and demo-1 are up"]


def test_the_loss_of_what_was_gone_past_is_known_too() -> None:
    replay = Replay(frozen_recording())
    list(replay.play_to_end())

    job = replay.history.shown
    assert job is not None
    assert len(job.loss.points) > 5
    assert job.loss.points[0][1] > job.loss.points[-1][1]


def test_an_empty_recording_is_over_at_once() -> None:
    playback = Playback(Recording(opening("demo-0"), [], is_cut=False), Thresholds())
    assert playback.is_over
    assert playback.view().num_ranks == 0
