from __future__ import annotations

from signal import Signals
from typing import get_args

import msgspec
import pytest

from agent.errors import InvalidTransitionError
from agent.jobs.job import (
    DONE_S,
    FIRST_PAUSE_S,
    KILL_AGAIN_S,
    LAUNCHER_END_S,
    MAX_PAUSE_S,
    STORY_LENGTH,
    UNCOMMITTED_S,
    Job,
)
from agent.jobs.lifecycle import (
    COMMAND_EVENTS,
    TRANSITIONS,
    AbortReceived,
    Answer,
    AskAll,
    AskProbe,
    AttemptFailed,
    CommitReceived,
    Effect,
    Event,
    FaultReceived,
    FollowRanks,
    ForgetJob,
    KillReceived,
    KillTree,
    LauncherFailed,
    LauncherFound,
    LauncherLost,
    LauncherNotStarted,
    LauncherStarted,
    LauncherSucceeded,
    ReleasePort,
    RestartAttempt,
    Round,
    RoundBegan,
    ShimKilled,
    SignalWorker,
    StartLauncher,
    StopReceived,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.jobs.record import JobRecord
from agent.logs.traceback_text import FailureText, FoundFailure
from agent.wire.commands import Accepted, RefusalReason, Refused
from agent.wire.jobs import ENDED_STATES, JobState
from ddpcore.wire import Fault, FaultKind, ReportNow, SlowDown, StopTraining
from tests.support.jobs import left, make_spec

ACCEPTED = Answer(Accepted())
OVERDUE = KillTree(spares_writers=True)

EVENTS: dict[type[Event], Event] = {
    CommitReceived: CommitReceived(),
    AbortReceived: AbortReceived(),
    StopReceived: StopReceived(),
    KillReceived: KillReceived(),
    FaultReceived: FaultReceived(Fault(FaultKind.FREEZE, 2)),
    LauncherStarted: LauncherStarted(),
    LauncherNotStarted: LauncherNotStarted("no memory"),
    LauncherSucceeded: LauncherSucceeded(),
    AttemptFailed: AttemptFailed(1),
    LauncherFailed: LauncherFailed(1),
    LauncherFound: LauncherFound(),
    LauncherLost: LauncherLost("nobody knows"),
    ShimKilled: ShimKilled(),
    WorkerFound: WorkerFound(2),
    WorkerExited: WorkerExited(2, 0, None),
    RoundBegan: RoundBegan(Round(1, 0, 4, 0, 2)),
    Ticked: Ticked(),
}
WAYS: dict[JobState, list[Event]] = {
    JobState.PREPARED: [],
    JobState.RUNNING: [CommitReceived(), LauncherStarted()],
    JobState.STOPPING: [CommitReceived(), LauncherStarted(), StopReceived()],
    JobState.SUCCEEDED: [CommitReceived(), LauncherStarted(), LauncherSucceeded()],
    JobState.FAILED: [CommitReceived(), LauncherStarted(), LauncherFailed(1)],
    JobState.STOPPED: [StopReceived()],
    JobState.RESTARTING: [CommitReceived(), LauncherStarted(), AttemptFailed(1)],
    JobState.LOST: [CommitReceived(), LauncherStarted(), LauncherLost("the node was rebooted")],
}


def job_in(state: JobState, *more: Event, max_restarts: int = 0, **changes: float) -> Job:
    is_restarting = state is JobState.RESTARTING
    job = Job(make_spec(max_restarts=max_restarts or 3 * is_restarting, **changes), 0.0)
    for event in (*WAYS[state], *more):
        job.handle(event, 0.0)
    assert job.state is state
    return job


def next_agents(job: Job) -> Job:
    """Return the job as an agent reads it that is started after this one."""
    return msgspec.json.decode(msgspec.json.encode(job), type=Job)


def refusal(effects: list[Effect]) -> Refused:
    (effect,) = effects
    assert isinstance(effect, Answer)
    assert isinstance(effect.reply, Refused)
    return effect.reply


def test_the_samples_cover_all_events() -> None:
    assert set(EVENTS) == set(get_args(Event))


@pytest.mark.parametrize("event_type", EVENTS)
@pytest.mark.parametrize("state", JobState)
def test_every_state_takes_exactly_the_events_of_the_table(state: JobState, event_type: type[Event]) -> None:
    job = job_in(state)
    after = TRANSITIONS.get((state, event_type))
    if after is None:
        with pytest.raises(InvalidTransitionError):
            job.handle(EVENTS[event_type], 1.0)
        assert job.state is state
    else:
        job.handle(EVENTS[event_type], 1.0)
        assert job.state is after
    job.validate()


def test_a_peer_may_ask_for_anything_in_any_state_and_gets_one_answer_or_a_launch() -> None:
    for state in JobState:
        for event_type in COMMAND_EVENTS:
            effects = job_in(state).handle(EVENTS[event_type], 1.0)
            answers = [effect for effect in effects if isinstance(effect, Answer | StartLauncher)]
            assert len(answers) == 1, (state, event_type)
            assert effects[-1] is answers[0]


def test_ended_states_are_never_left() -> None:
    assert all(after is state for (state, _), after in TRANSITIONS.items() if state in ENDED_STATES)


def test_every_state_can_be_reached_and_every_living_one_can_end() -> None:
    assert {after for (before, _), after in TRANSITIONS.items() if after is not before} | {JobState.PREPARED} == set(
        JobState
    )
    for state in set(JobState) - ENDED_STATES:
        assert any(before is state and after in ENDED_STATES for (before, _), after in TRANSITIONS.items()), state


def test_an_impossible_event_tells_the_last_events() -> None:
    job = job_in(JobState.RUNNING)
    for second in range(STORY_LENGTH):
        job.handle(Ticked(), float(second))
    with pytest.raises(InvalidTransitionError, match="job train is running: LauncherStarted cannot happen") as caught:
        job.handle(LauncherStarted(), 99.0)
    assert len(caught.value.story) == STORY_LENGTH
    assert "LauncherStarted" in caught.value.story[-1]


def test_a_commit_starts_the_launcher_and_is_answered_by_how_that_went() -> None:
    job = Job(make_spec(), 0.0)
    assert job.handle(CommitReceived(), 1.0) == [StartLauncher()]
    assert job.handle(LauncherStarted(), 1.0) == [ReleasePort(), ACCEPTED]
    assert job.handle(CommitReceived(), 2.0) == [ACCEPTED]


def test_a_launcher_that_cannot_start_leaves_the_job_prepared() -> None:
    job = job_in(JobState.PREPARED, CommitReceived())
    assert refusal(job.handle(LauncherNotStarted("no memory"), 1.0)) == Refused(RefusalReason.CANNOT_SPAWN, "no memory")
    assert job.state is JobState.PREPARED


def test_an_abort_forgets_a_prepared_job_and_no_other() -> None:
    assert job_in(JobState.PREPARED).handle(AbortReceived(), 1.0) == [ReleasePort(), ForgetJob(), ACCEPTED]
    assert refusal(job_in(JobState.RUNNING).handle(AbortReceived(), 1.0)).reason is RefusalReason.WRONG_STATE
    assert job_in(JobState.FAILED).handle(AbortReceived(), 1.0) == [ACCEPTED]


def test_what_nobody_begins_is_taken_back_in_time() -> None:
    job = job_in(JobState.PREPARED)
    assert job.handle(Ticked(), UNCOMMITTED_S - 0.1) == []
    assert job.handle(Ticked(), UNCOMMITTED_S) == [ReleasePort(), ForgetJob()]


@pytest.mark.parametrize("event", [StopReceived(), KillReceived()])
def test_ending_what_does_not_run_is_well_and_what_never_began_is_forgotten(event: Event) -> None:
    assert job_in(JobState.PREPARED).handle(event, 1.0) == [ReleasePort(), ForgetJob(), ACCEPTED]
    assert job_in(JobState.SUCCEEDED).handle(event, 1.0) == [ACCEPTED]


def test_a_stop_is_patient_for_the_grace_period_and_then_kills_until_it_is_over() -> None:
    job = job_in(JobState.RUNNING)
    assert job.handle(StopReceived(), 100.0) == [TerminateLauncher(), ACCEPTED]
    assert job.status(103.0).detail == "stopping by SIGTERM; what is left in 7 s is killed"
    assert job.handle(StopReceived(), 105.0) == [ACCEPTED]
    assert job.handle(Ticked(), 109.9) == []
    assert job.handle(Ticked(), 110.0) == [OVERDUE]
    assert job.handle(Ticked(), 110.2) == []
    assert job.handle(Ticked(), 110.0 + KILL_AGAIN_S) == [OVERDUE]
    assert job.handle(LauncherFailed(-9), 116.0) == []
    assert job.state is JobState.STOPPED
    assert job.handle(Ticked(), 200.0) == []


UNDYING = "pid 7 (rank 3) does not die: state D in nfs_wait"


def test_what_sigkill_does_not_end_is_said_and_no_kill_is_announced_again() -> None:
    job, sent = job_in(JobState.RUNNING), "stopping by SIGKILL, sent"
    job.handle(StopReceived(), 100.0)
    assert job.handle(Ticked(), 110.0) == [OVERDUE]
    assert job.status(113.0).detail == f"{sent} 3 s ago; waiting for what is left"
    assert job.handle(Ticked(undying=UNDYING), 120.0) == [OVERDUE]
    assert job.status(121.0).detail == f"{sent} 11 s ago; {UNDYING}"
    assert job.status(170.0).detail == f"{sent} 60 s ago; {UNDYING}; the node may need a reboot"
    job.handle(Ticked(), 180.0)
    assert job.status(180.0).detail == f"{sent} 70 s ago; waiting for what is left"


def test_what_a_failed_rank_leaves_alive_is_said_while_it_runs_and_before_a_restart() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(3), WorkerExited(2, 1, None), max_restarts=1)
    assert job.handle(Ticked(), 100.0) == [OVERDUE]
    job.handle(Ticked(undying=UNDYING), 104.0)
    ending = f"ending the others by SIGKILL, sent 4 s ago; {UNDYING}"
    assert job.status(104.0).detail == f"rank 2 exited with code 1; {ending}"
    job.handle(job.launcher_ended(None), 110.0)
    job.handle(Ticked(has_leftovers=True), 110.0)
    assert job.status(110.0).detail == "rank 2 exited with code 1; restarts in 1 s, 1 of 1 restarts left"
    job.handle(Ticked(has_leftovers=True, undying=UNDYING), 120.0)
    waits = "restarts once the rest is gone, 1 of 1 restarts left; ending it by SIGKILL, sent 20 s ago"
    assert job.status(120.0).detail == f"rank 2 exited with code 1; {waits}; {UNDYING}"
    assert job.handle(Ticked(), 121.0) == [RestartAttempt(1)]
    job.handle(LauncherStarted(), 121.0)
    job.handle(StopReceived(), 121.0)
    assert job.status(121.0).detail.startswith("stopping by SIGTERM")


def test_a_kill_does_not_wait_and_overtakes_a_stop() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(StopReceived(), 0.0)
    assert job.handle(KillReceived(), 1.0) == [KillTree(), ACCEPTED]
    assert job_in(JobState.RUNNING).handle(KillReceived(), 1.0) == [KillTree(), ACCEPTED]


def test_a_stopped_job_that_was_killed_states_it() -> None:
    stopped, killed = job_in(JobState.RUNNING), job_in(JobState.RUNNING)
    stopped.handle(StopReceived(), 0.0)
    killed.handle(KillReceived(), 0.0)
    for job in (stopped, killed):
        job.handle(LauncherFailed(-15), 1.0)

    assert (stopped.state, stopped.status(2.0).detail) == (JobState.STOPPED, "")
    assert (killed.state, killed.status(2.0).detail) == (JobState.STOPPED, "by SIGKILL")


def test_a_job_that_ends_well_once_it_was_told_to_stop_is_stopped() -> None:
    job = job_in(JobState.STOPPING)
    job.handle(job.launcher_ended(0), 1.0)
    assert job.state is JobState.STOPPED
    assert job.status(1.0).exit_code == 0


AGREED = StopReceived(is_agreed=True, can_agree=True)


def test_ranks_that_can_agree_are_asked_first_and_have_time_to_save() -> None:
    job = job_in(JobState.RUNNING, save_s=60.0)
    assert job.handle(AGREED, 100.0) == [AskAll(StopTraining(request_id=1)), ACCEPTED]
    assert job.status(115.0).detail == "stopping after a step and a checkpoint; SIGTERM in 45 s"
    assert job.handle(AGREED, 120.0) == [ACCEPTED]
    assert job.handle(StopReceived(is_agreed=True), 121.0) == [ACCEPTED], "they cannot any more: they are saving"
    assert job.handle(Ticked(), 159.9) == []
    assert job.handle(Ticked(), 160.0) == [TerminateLauncher()]
    assert job.status(163.0).detail == "stopping by SIGTERM; what is left in 7 s is killed"
    assert job.handle(Ticked(), 170.0) == [OVERDUE]


def test_an_agreed_stop_ends_soon_once_no_rank_is_left_here() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2), WorkerFound(3), save_s=60.0)
    job.handle(AGREED, 0.0)
    job.handle(WorkerExited(2, 0, None), 5.0)
    assert job.handle(Ticked(), 5.0 + DONE_S) == []
    job.handle(WorkerExited(3, 0, None), 20.0)
    assert job.handle(Ticked(), 20.0 + DONE_S - 0.1) == []
    assert job.handle(Ticked(), 20.0 + DONE_S) == [TerminateLauncher()], "torchrun waits for other nodes"
    job.validate()


def test_an_agreed_stop_gives_way_to_one_that_does_not_wait() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(AGREED, 0.0)
    assert job.handle(StopReceived(), 5.0) == [TerminateLauncher(), ACCEPTED]
    assert job.handle(StopReceived(), 6.0) == [ACCEPTED]
    assert job.handle(Ticked(), 15.0) == [OVERDUE]


def test_when_the_first_rank_has_failed_the_others_are_asked_what_they_have_called() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2), WorkerFound(3))
    assert job.handle(WorkerExited(2, None, Signals.SIGABRT), 5.0) == [AskAll(ReportNow(request_id=1))]
    assert job.handle(WorkerExited(3, None, Signals.SIGTERM), 5.1) == [], "torchrun ends them now"


def test_of_a_rank_that_ends_well_or_is_stopped_nobody_is_asked() -> None:
    assert job_in(JobState.RUNNING, WorkerFound(2)).handle(WorkerExited(2, 0, None), 5.0) == []
    assert job_in(JobState.STOPPING, WorkerFound(2)).handle(WorkerExited(2, None, Signals.SIGTERM), 5.0) == []


def test_a_rank_that_fails_ends_the_patience_with_an_agreed_stop() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2), save_s=60.0)
    job.handle(AGREED, 0.0)
    job.handle(WorkerExited(2, 1, None, left("OSError: disk full")), 5.0)
    assert job.handle(Ticked(), 14.9) == []
    assert job.handle(Ticked(), 15.0) == [OVERDUE]
    job.handle(LauncherFailed(1), 16.0)
    assert job.state is JobState.STOPPED


def test_ranks_that_cannot_agree_get_sigterm_at_once() -> None:
    assert job_in(JobState.RUNNING).handle(StopReceived(is_agreed=True), 1.0) == [TerminateLauncher(), ACCEPTED]


def test_a_launcher_that_lingers_after_a_rank_has_failed_is_ended() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2), WorkerFound(3), grace_s=0.0)
    job.handle(WorkerExited(3, None, 9), 10.0)
    assert job.status(10.0).detail == "rank 3 was killed by SIGKILL; waiting for the launcher to end the others"
    assert job.handle(WorkerExited(2, 1, None, left("RuntimeError: closed")), 11.0) == []
    assert job.handle(Ticked(), 10.0 + LAUNCHER_END_S - 0.1) == []
    assert job.handle(Ticked(), 10.0 + LAUNCHER_END_S) == [OVERDUE]
    job.handle(LauncherFailed(-9), 14.0)
    assert job.status(14.0).detail == "rank 3 was killed by SIGKILL"
    job.validate()


def test_ranks_that_ended_well_or_unknown_leave_the_launcher_its_time() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2), WorkerFound(3))
    job.handle(WorkerExited(2, 0, None), 1.0)
    assert job.status(1.0).detail == ""
    job.handle(WorkerExited(3, None, None), 1.0)
    assert job.handle(Ticked(), 1e6) == []
    assert job.status(2.0).detail == "all ranks of this node have ended; the launcher waits for the other nodes"


def test_a_failing_rank_does_not_lengthen_a_stop() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(2))
    job.handle(StopReceived(), 0.0)
    job.handle(WorkerExited(2, None, 15), 9.0)
    assert job.handle(Ticked(), 10.0) == [OVERDUE]


def test_an_exit_that_is_noticed_after_the_launchers_explains_it_and_changes_no_state() -> None:
    job = job_in(JobState.FAILED, WorkerExited(2, 7, None))
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert job.status(0.0).detail == "rank 2 exited with code 7"
    assert job_in(JobState.STOPPED, WorkerExited(2, 7, None)).status(0.0).detail == ""


def test_a_killed_shim_leaves_a_tree_to_kill() -> None:
    job = job_in(JobState.RUNNING)
    assert job.handle(LauncherFailed(None), 1.0) == [KillTree()]
    assert (
        job.status(1.0).detail
        == "the shim, rankdeck's process above the launcher, was killed, and the launcher with it"
    )


def test_a_launcher_that_fails_before_any_rank_says_why() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(job.launcher_ended(1, left("DistStoreError: Timed out")), 1.0)
    assert job.status(1.0).detail == "the launcher exited with code 1: DistStoreError: Timed out"
    killed = job_in(JobState.RUNNING)
    killed.handle(LauncherFailed(-11), 1.0)
    assert killed.status(1.0).detail == "the launcher was killed by SIGSEGV"


def test_a_fault_is_carried_out_and_the_probe_s_requests_have_growing_numbers() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(3))
    assert job.handle(FaultReceived(Fault(FaultKind.FREEZE, 3)), 1.0) == [SignalWorker(3, Signals.SIGSTOP), ACCEPTED]
    assert job.handle(FaultReceived(Fault(FaultKind.SLOW, 3)), 1.0) == [AskProbe(3, SlowDown(2, 8.0)), ACCEPTED]


@pytest.mark.parametrize(
    ("state", "more", "rank", "reason", "words"),
    [
        (JobState.RUNNING, [], 1, RefusalReason.UNKNOWN_RANK, "this node has ranks 2 to 3"),
        (JobState.RUNNING, [], 3, RefusalReason.WRONG_STATE, "rank 3 has not started yet"),
        (JobState.RUNNING, [WorkerExited(3, 0, None)], 3, RefusalReason.WRONG_STATE, "rank 3 has exited"),
        (JobState.PREPARED, [], 3, RefusalReason.WRONG_STATE, "job train is prepared"),
        (JobState.STOPPING, [], 3, RefusalReason.WRONG_STATE, "job train is stopping"),
    ],
)
def test_faults_that_do_not_fit_are_refused(
    state: JobState, more: list[Event], rank: int, reason: RefusalReason, words: str
) -> None:
    refused = refusal(job_in(state, *more).handle(FaultReceived(Fault(FaultKind.KILL, rank)), 1.0))
    assert refused.reason is reason
    assert words in refused.message


@pytest.mark.parametrize(("num_nodes", "whom"), [(2, "the other nodes"), (1, "torch")])
def test_a_launcher_that_starts_no_ranks_is_said_to_wait(num_nodes: int, whom: str) -> None:
    job = Job(make_spec(num_nodes=num_nodes), 0.0)
    job.handle(CommitReceived(), 0.0)
    job.handle(LauncherStarted(), 0.0)
    assert job.status(9.0).detail == ""
    assert job.status(35.0).detail == f"no rank has been started for 35 s: the launcher waits for {whom}"
    job.handle(WorkerFound(2), 36.0)
    assert job.status(37.0).detail == ""


def test_the_status_says_how_long_the_state_has_lasted() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(StopReceived(), 5.0)
    assert job.status(7.0).state_s == 2.0
    assert job.status(7.0).first_rank == 2


@pytest.mark.parametrize("allows", [True, False])
def test_the_status_says_whether_faults_are_allowed(*, allows: bool) -> None:
    assert Job(make_spec(allow_faults=allows), 0.0).status(0.0).allow_faults is allows


def test_a_failed_job_begins_again_after_a_pause_that_doubles_while_its_budget_lasts() -> None:
    job, now_s = job_in(JobState.RUNNING, max_restarts=8), 0.0
    pauses = []
    while isinstance(ended := job.launcher_ended(1, left("ValueError: bad")), AttemptFailed):
        failed_at_s = now_s
        assert job.handle(ended, now_s) == []
        attempt = job.spec.attempt
        while not (effects := job.handle(Ticked(), now_s)):
            now_s += 0.25
        assert effects == [RestartAttempt(attempt + 1)]
        pauses.append(now_s - failed_at_s)
        assert job.handle(LauncherStarted(), now_s) == [ReleasePort()]
        assert job.spec.attempt == attempt + 1
        job.validate()
    job.handle(ended, now_s)

    assert pauses == [min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(8)]
    assert job.state is JobState.FAILED
    status = job.status(now_s)
    assert (status.attempt, status.num_restarts, status.max_restarts, status.exit_code) == (8, 8, 8, 1)
    assert status.detail == "the launcher exited with code 1: ValueError: bad"


def test_a_job_between_two_attempts_says_why_and_when() -> None:
    job = job_in(JobState.RUNNING, WorkerFound(3), WorkerExited(3, None, 9), max_restarts=3)
    job.handle(job.launcher_ended(1), 10.0)
    assert job.state is JobState.RESTARTING
    assert job.status(10.0).detail == "rank 3 was killed by SIGKILL; restarts in 1 s, 3 of 3 restarts left"
    job.handle(Ticked(), 11.0)
    job.handle(LauncherStarted(), 11.0)
    assert job.status(11.0).detail == ""


def test_a_job_does_not_begin_again_beside_what_is_left_of_its_last_attempt() -> None:
    job = job_in(JobState.RUNNING, max_restarts=1)
    assert job.handle(job.launcher_ended(None), 0.0) == [KillTree()]
    assert job.handle(Ticked(has_leftovers=True), 100.0) == []
    assert job.handle(Ticked(), 101.0) == [RestartAttempt(1)]


def test_a_job_that_cannot_begin_again_fails_and_says_why() -> None:
    job = job_in(JobState.RESTARTING)
    assert job.handle(LauncherNotStarted("port 29500 is taken"), 1.0) == [ReleasePort()]
    assert job.state is JobState.FAILED
    assert job.status(1.0).detail == "the job could not restart: port 29500 is taken"


@pytest.mark.parametrize("event", [StopReceived(), KillReceived()])
def test_a_job_between_two_attempts_is_stopped_at_once(event: Event) -> None:
    job = job_in(JobState.RESTARTING)
    assert job.handle(event, 1.0) == [ACCEPTED]
    assert job.state is JobState.STOPPED
    assert job.handle(Ticked(), 100.0) == []


def test_a_job_that_was_told_to_stop_does_not_begin_again() -> None:
    job = job_in(JobState.STOPPING, max_restarts=3)
    assert job.launcher_ended(1) == LauncherFailed(1)


def test_faults_strike_in_the_first_attempt_only() -> None:
    spec = make_spec(max_restarts=1, faults=[Fault(FaultKind.KILL, 2, at_step=3)])
    job = Job(spec, 0.0)
    for event in (CommitReceived(), LauncherStarted(), AttemptFailed(1), Ticked(), LauncherStarted()):
        job.handle(event, 100.0 * (event == Ticked()))
    assert job.spec == make_spec(max_restarts=1, attempt=1)


@pytest.mark.parametrize("state", JobState)
def test_a_job_read_from_disk_is_the_job_that_was_written(state: JobState) -> None:
    job = job_in(state)

    restored = next_agents(job)

    assert restored == job
    assert restored.status(7.0) == msgspec.structs.replace(job.status(7.0), is_past=job.has_ended)
    restored.validate()


def test_a_record_of_the_version_before_is_read() -> None:
    written = """{"record_version":1,"boot_id":"b","memory":{"spec":{"job_id":"train","attempt":0,"python":"python3",
        "command":["train.py"],"workdir":"/data","num_nodes":1,"node_rank":0,"local_world_size":2,"first_rank":0,
        "world_size":2,"master_addr":"127.0.0.1","max_restarts":2},"state":"restarting","since_s":6.0,
        "cause":"rank 0 exited with code 1: KeyError: 3","failure":{"at_s":5.0,"cause":{"rank":0,"end":"exited with code
        1","exception":"KeyError: 3"},"is_launcher_ended":false,"together_s":1.5,"is_bare_signal":false},
        "kill_at_s":15.0,"begin_again_at_s":7.0,"unprobed":"as asked","started_s":3.0,"last_request_id":1},
        "address":[2,"127.0.0.1"],"before":null}"""

    record = msgspec.json.decode(written.replace("\n        ", " "), type=JobRecord)

    job = record.job
    job.validate()
    assert (job.state, job.since_s, job.restart_at_s, job.kill_at_s, job.started_s) == (
        JobState.RESTARTING,
        6.0,
        7.0,
        15.0,
        3.0,
    )
    assert (job.cause, job.unprobed, job.last_request_id) == ("rank 0 exited with code 1: KeyError: 3", "as asked", 1)
    assert cause_of(job) == (0, "KeyError: 3", False)
    assert record.address == (2, "127.0.0.1")


def test_how_long_ago_an_attempt_was_started_is_told_by_the_agent_whatever_became_of_it() -> None:
    job = Job(make_spec(max_restarts=1), 0.0)
    assert job.status(5.0).age_s is None, "it is only prepared"
    for event in (CommitReceived(), LauncherStarted()):
        job.handle(event, 10.0)
    assert job.status(15.0).age_s == 5.0
    job.handle(AttemptFailed(1), 20.0)
    assert job.status(21.0).age_s == 11.0
    job.handle(LauncherStarted(), 30.0)
    assert next_agents(job).status(33.0).age_s == 3.0
    assert job.of_another_boot(0.0).status(33.0).age_s is None


def test_what_only_the_agent_that_started_the_ranks_knows_outlives_it() -> None:
    job = Job(make_spec(), 0.0)
    for event in (CommitReceived(), LauncherStarted("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it out")):
        job.handle(event, 0.0)
    last_id = job.new_request_id()

    restored = next_agents(job)

    assert restored.status(1.0).unprobed == "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it out"
    assert restored.new_request_id() > last_id


def test_after_a_reboot_the_clock_has_begun_anew_and_times_are_as_far_apart_as_before() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(StopReceived(), 5000.0)
    job.handle(Ticked(), 5000.0)
    restored = job.of_another_boot(-4970.0)
    assert (restored.status(40.0).state_s, restored.status(40.0).stop_s) == (10.0, 10.0)
    assert job.kill_at_s is not None
    assert restored.kill_at_s == job.kill_at_s - 4970.0
    assert (restored.terminate_at_s, restored.failure) == (None, None)


def test_a_lost_job_says_so_and_what_may_be_left_of_it_is_killed() -> None:
    job = job_in(JobState.RUNNING)
    assert job.handle(LauncherLost("the node was rebooted"), 1.0) == [KillTree()]
    assert (job.state, job.exit_code, job.status(1.0).detail) == (JobState.LOST, None, "the node was rebooted")


def cause_of(job: Job) -> tuple[int, str, bool]:
    cause = job.status(20.0).root_cause
    assert cause is not None
    return (cause.rank, cause.exception, cause.is_consequence)


LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def test_the_rank_that_failed_first_is_the_cause_whichever_was_noticed_first() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(WorkerExited(2, 1, None, left("ValueError: late", failed_s=4.0)), 5.0)
    job.handle(WorkerExited(3, 1, None, left("ValueError: early", failed_s=3.0)), 6.0)
    assert cause_of(job) == (3, "ValueError: early", False)
    cause = job.status(20.0).root_cause
    assert cause is not None
    assert (cause.end, cause.where, cause.age_s) == ("exited with code 1", "train.py:3 in main", 17.0)
    assert job.status(20.0).detail.startswith("rank 3 exited with code 1: ValueError: early")


def test_a_rank_without_an_exception_is_told_with_its_last_line() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(WorkerExited(3, 2, None, FoundFailure(FailureText(last_line="train.py: error: no data"), 3)), 5.0)

    cause = job.status(20.0).root_cause
    assert cause is not None
    assert cause.end == "exited with code 2; its last line: train.py: error: no data"
    assert (cause.exception, cause.is_consequence) == ("", False)
    assert job.status(20.0).detail.startswith("rank 3 exited with code 2; its last line: train.py: error: no data")


def test_of_an_error_that_all_ranks_raise_the_rank_whose_problem_it_is_is_the_cause() -> None:
    error = "ddpcore.errors.CheckpointDirectoryError: rank 3: /runs is in use by another run"
    job = job_in(JobState.RUNNING)
    job.handle(WorkerExited(2, 1, None, left(error, failed_s=3.0)), 5.0)
    assert cause_of(job) == (2, error, True)
    job.handle(WorkerExited(3, 1, None, left(error, failed_s=4.0)), 6.0)

    assert cause_of(job) == (3, error, False)


def test_a_last_line_may_say_that_another_was_lost() -> None:
    job = job_in(JobState.RUNNING)
    job.handle(WorkerExited(2, 1, None, FoundFailure(FailureText(last_line=f"train.py: {LOST}"), 2)), 5.0)
    job.handle(WorkerExited(3, 1, None, left("KeyError: 'x'")), 6.0)

    assert cause_of(job) == (3, "KeyError: 'x'", False)


@pytest.mark.parametrize(
    ("victim", "culprit", "told"),
    [
        (WorkerExited(2, 1, None, left(LOST)), WorkerExited(3, 1, None, left("KeyError: 'x'")), "KeyError: 'x'"),
        (WorkerExited(2, None, 6, left(LOST)), WorkerExited(3, 3, None), ""),
        (WorkerExited(2, None, 15), WorkerExited(3, None, 9), ""),
        (WorkerExited(2, 1, None, left(LOST)), WorkerExited(3, None, 6, left("what happened")), "what happened"),
    ],
)
def test_a_victim_is_never_the_cause_while_there_is_another(
    victim: WorkerExited, culprit: WorkerExited, told: str
) -> None:
    for events in ((victim, culprit), (culprit, victim)):
        job = job_in(JobState.RUNNING, *events)
        assert cause_of(job) == (3, told, False)


def test_a_victim_alone_is_told_as_one() -> None:
    assert cause_of(job_in(JobState.RUNNING, WorkerExited(2, 1, None, left(LOST)))) == (2, LOST, True)
    assert cause_of(job_in(JobState.RUNNING, WorkerExited(2, None, 15))) == (2, "", True)


def test_what_ends_because_the_job_was_told_to_has_no_cause() -> None:
    job = job_in(JobState.STOPPING, WorkerExited(2, None, 15), WorkerExited(3, 1, None, left("KeyError: 3")))
    job.handle(LauncherFailed(1), 1.0)
    assert job.status(2.0).root_cause is None


def test_a_cause_is_remembered_until_the_job_begins_again() -> None:
    job = job_in(JobState.RUNNING, WorkerExited(3, 1, None, left("KeyError: 3")), max_restarts=1)
    job.handle(job.launcher_ended(1), 5.0)
    restored = next_agents(job)
    assert cause_of(restored) == (3, "KeyError: 3", False)
    restored.handle(LauncherStarted(), 8.0)
    assert restored.status(9.0).root_cause is None


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (None, (-1, "", False)),
        (left("FileNotFoundError: train.py"), (-1, "FileNotFoundError: train.py", False)),
        (left("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"), None),
        (left("DistStoreError: Timed out"), (-1, "DistStoreError: Timed out", True)),
        (left("SyntaxError: invalid syntax", rank=3), (3, "SyntaxError: invalid syntax", False)),
    ],
)
def test_a_launcher_that_fails_before_any_rank_was_seen_tells_the_cause(
    found: FoundFailure | None, cause: tuple[int, str, bool] | None
) -> None:
    job = job_in(JobState.RUNNING)
    job.handle(job.launcher_ended(1, found), 1.0)
    if cause:
        assert cause_of(job) == cause
    else:
        assert cause_of(job)[2]


def elastic_job(**changes: int) -> Job:
    job = Job(make_spec(**{"elastic_min_nodes": 1, "max_restarts": 3, **changes}), 0.0)
    for event in WAYS[JobState.RUNNING]:
        job.handle(event, 0.0)
    return job


def test_a_round_says_which_ranks_are_here() -> None:
    job = elastic_job(attempt=4)
    assert elastic_job().is_gathering

    assert job.handle(RoundBegan(Round(1, 0, 4, 0, 2)), 1.0) == [FollowRanks()]

    assert not job.is_gathering
    assert job.ranks == range(2)
    told = job.status(1.0)
    assert (told.attempt, told.num_restarts, told.node_rank, told.num_nodes) == (5, 0, 0, 2)
    assert job.handle(RoundBegan(Round(1, 0, 4, 0, 2)), 2.0) == []


def test_a_rank_that_fails_in_an_elastic_job_is_the_launchers_to_follow() -> None:
    job = elastic_job()
    job.handle(RoundBegan(Round(1, 2, 4, 1, 2)), 1.0)
    job.handle(WorkerExited(3, 1, None), 2.0)
    assert job.status(3.0).detail == "rank 3 exited with code 1; the launcher gathers the nodes again, at least 1"

    assert job.handle(Ticked(), 1000.0) == []

    job.handle(RoundBegan(Round(2, 0, 2, 0, 1)), 1001.0)
    told = job.status(1001.0)
    assert (told.detail, told.root_cause, told.num_restarts, told.world_size) == ("", None, 1, 2)


def test_an_elastic_job_is_not_begun_again_by_the_agent() -> None:
    job = elastic_job()
    job.handle(job.launcher_ended(1), 2.0)
    assert job.state is JobState.FAILED


@pytest.mark.parametrize("later_s", [0.5, 30.0], ids=["at once", "after the 30 s that ranks get"])
@pytest.mark.parametrize("raised", [("KeyboardInterrupt", ""), ("OSError: handled", "KeyboardInterrupt")])
def test_ranks_that_a_launcher_has_passed_sigint_to_are_no_cause(later_s: float, raised: tuple[str, str]) -> None:
    job = job_in(JobState.RUNNING)
    job.handle(WorkerExited(2, None, 2, FoundFailure(FailureText(*raised))), 5.0)
    asked = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 2"
    job.handle(job.launcher_ended(1, left(asked, rank=-1)), 5.0 + later_s)
    cause = job.status(40.0).root_cause
    assert cause is not None
    assert (cause.rank, cause.exception) == (-1, asked)


def test_ranks_that_hang_with_nobody_watching_are_ended() -> None:
    job = job_in(JobState.RUNNING, abandon_s=600.0, grace_s=10.0)
    assert job.handle(Ticked(abandoned_s=599.0), 599.0) == []

    assert job.handle(Ticked(abandoned_s=600.0), 600.0) == [TerminateLauncher()]

    assert job.handle(Ticked(abandoned_s=605.0), 605.0) == []
    assert job.handle(Ticked(abandoned_s=610.0), 610.0) == [OVERDUE]
    job.handle(WorkerExited(2, None, 15, left("SignalException")), 611.0)
    job.handle(job.launcher_ended(1, left("SignalException")), 612.0)
    told = job.status(612.0)
    assert told.state is JobState.FAILED
    assert told.detail == "no rank of this node got any further for 600 s, and nobody was watching: ended"
    assert told.root_cause is None


def test_an_abandoned_job_with_restarts_left_begins_again() -> None:
    job = job_in(JobState.RUNNING, abandon_s=600.0, max_restarts=1)
    job.handle(Ticked(abandoned_s=600.0), 600.0)
    restored = next_agents(job)
    restored.handle(LauncherFound(), 601.0)
    restored.handle(restored.launcher_ended(1, left("SignalException")), 602.0)
    assert restored.state is JobState.RESTARTING
    assert restored.status(602.0).detail.startswith("no rank of this node got any further for 600 s")
    restored.handle(LauncherStarted(), 604.0)
    assert restored.handle(Ticked(abandoned_s=3.0), 605.0) == []


@pytest.mark.parametrize("state", [JobState.PREPARED, JobState.STOPPING, JobState.RESTARTING, JobState.FAILED])
def test_only_running_jobs_are_abandoned(state: JobState) -> None:
    job = job_in(state, abandon_s=600.0)
    assert job.handle(Ticked(has_leftovers=True, abandoned_s=1e6), 0.5) == []


def test_nothing_is_abandoned_unasked() -> None:
    assert job_in(JobState.RUNNING).handle(Ticked(abandoned_s=1e9), 1.0) == []


@pytest.mark.parametrize(("max_restarts", "state"), [(0, JobState.FAILED), (1, JobState.RESTARTING)])
def test_a_job_without_a_shim_restarts_only_where_its_failure_is_known(max_restarts: int, state: JobState) -> None:
    job = job_in(JobState.RUNNING, ShimKilled(), max_restarts=max_restarts)
    assert "(its shim) was killed: training goes on" in job.status(1.0).detail
    assert isinstance(job.launcher_ended(None), LauncherLost)
    assert job.launcher_ended(0) == LauncherSucceeded()

    job.handle(WorkerExited(2, 1, None), 1.0)
    assert job.handle(job.launcher_ended(None), 2.0) == [KillTree()]
    assert job.state is state
    if max_restarts:
        job.handle(LauncherStarted(), 3.0)
        assert job.status(3.0).detail == ""
