"""A job that rankdeck did not start, as the console's rows show it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from app.diagnosis.causes import RankState, Severity
from app.diagnosis.rank_facts import STATES
from app.filters.ranks import RankOrder, in_order
from app.inspect.following import Following
from app.inspect.inspection_text import job_lines, sentence
from app.inspect.outside_reports import distinction
from app.inspect.outside_view import OutsideView, Picture, cluster_of
from app.inspect.seen import HostSeen, SeenFrame, SeenJob, SeenRank
from app.model.unreachable_reason import UnreachableReason
from app.stacks.groups import picture_of
from app.stacks.stack_text import heading_text
from app.text import UNKNOWN
from app.tui.theme import Look
from app.tui.widgets.drawing import fact_lines
from tests.support.seen_ranks import BACKWARD, C10D, MODULE, WAITS, at, inside, rank

NOW_S = 100.0


def picture(*ranks: SeenRank, size: int = 0, **away: UnreachableReason) -> Picture:
    job = SeenJob("k", "torchrun", size or len(ranks), list(ranks))
    return Picture(job, sorted({*(one.host for one in ranks), *away}), {one.host: NOW_S for one in ranks}, away)


def view(*ranks: SeenRank, size: int = 0) -> OutsideView:
    return OutsideView(picture(*ranks, size=size), NOW_S + 1.0)


def host(*ranks: SeenRank) -> HostSeen:
    return HostSeen(list(ranks), {}, "ada", is_root=False, yama=None)


def test_each_rank_has_a_row_with_what_is_known_of_it() -> None:
    rows = view(
        rank(0, WAITS, seconds=9),
        rank(1, at(14), asleep_s=9.0),
        rank(2, WAITS, state="T"),
        rank(3, at(14), at(15), at(16)),
        rank(4, [], trouble="Permission denied"),
        rank(5, WAITS, state=""),
        rank(6, WAITS, state="D"),
        size=8,
    ).ranks()
    assert [row.state for row in rows] == [
        RankState.WAITING,
        RankState.RUNNING,
        RankState.FROZEN,
        RankState.RUNNING,
        RankState.UNPROBED,
        RankState.ENDED,
        RankState.RUNNING,
        RankState.UNPROBED,
    ]
    assert (rows[0].op, rows[0].seq, rows[0].waiting_s, rows[0].where) == (
        "all_reduce",
        None,
        9.0,
        "train.py:30 in main",
    )
    assert (rows[0].step, rows[0].pid, rows[0].node) == (57, 100, "h1")
    assert rows[1].detail.startswith("stands; sleeps")
    assert rows[1].waiting_s is None
    assert rows[4].detail == "Permission denied"
    assert rows[5].detail == "ended, it is not known how"
    assert rows[6].detail.startswith("blocked in the kernel")
    assert (rows[7].detail, rows[7].node, rows[7].pid) == (
        "not seen: ended, or on a host that is not looked at",
        "",
        None,
    )


def test_what_is_not_known_is_none_and_no_zero() -> None:
    shown = view(rank(0, WAITS), rank(1, at(14)))
    for row in shown.ranks():
        assert (row.rss_bytes, row.loss, row.quiet_s, row.wait_frac, row.local_rank, row.seq) == (None,) * 6
    (node,) = shown.nodes()
    assert (node.cpu_frac, node.memory_used_bytes, node.load_1min, node.num_ranks) == (None, None, None, 2)
    assert shown.barriers() == []
    assert shown.why_unknown


def test_the_headline_is_the_sentence_of_inspect_and_an_alarm_is_a_verdict_about_its_culprits() -> None:
    ranks = [rank(0, WAITS, seconds=9), rank(1, at(14), seconds=9), rank(2, WAITS, seconds=9, host="h2")]
    seen = picture(*ranks)
    shown = OutsideView(seen, NOW_S)
    assert shown.headline().text == f"seen from outside: {sentence(seen.job, seen.finding)}"
    assert shown.headline().severity is Severity.CRITICAL
    (verdict,) = shown.verdicts()
    assert (verdict.culprits, verdict.waiting, verdict.node, verdict.where) == ([1], [0, 2], "h1", "load.py:14 in read")
    assert verdict.text == shown.headline().text
    assert "--pid 101 on h1" in verdict.hint
    row = shown.ranks([1])[0]
    assert (row.state, row.severity) == (RankState.MISSING, Severity.CRITICAL)
    assert [node.ranks for node in shown.nodes()] == ["0-1", "2"]
    assert shown.rank_table is not None
    assert shown.rank_table.is_problem.tolist() == [False, True, False]


def test_who_is_not_sure_yet_is_not_told_to_type_an_option() -> None:
    shown = view(rank(0, WAITS), rank(1, at(14)))
    assert shown.headline().severity is Severity.WARNING
    assert "--looks" not in shown.headline().text
    assert shown.verdicts() == []
    assert shown.ranks([1])[0].state is RankState.MISSING


LONG_S = 40
FINDINGS = {
    "frozen": [rank(0, WAITS, state="T"), rank(1, WAITS)],
    "mismatch": [
        rank(0, WAITS, seconds=LONG_S),
        rank(1, inside("broadcast"), seconds=LONG_S),
        rank(2, WAITS, seconds=LONG_S),
    ],
    "missing": [rank(0, WAITS), rank(1, WAITS, state="")],
    "same_call": [rank(0, WAITS, seconds=LONG_S), rank(1, WAITS, seconds=LONG_S)],
    "backward": [rank(0, BACKWARD, seconds=LONG_S), rank(1, BACKWARD, seconds=LONG_S)],
    "not_exiting": [
        rank(0, inside("join", file="/usr/lib/python3.11/threading.py")[:1], seconds=LONG_S),
        rank(1, at(3), at(4)),
    ],
    "standstill": [rank(0, at(14), seconds=LONG_S), rank(1, at(15), seconds=LONG_S)],
    "unseen": [rank(0, [], trouble="no"), rank(1, WAITS)],
    "moving": [rank(0, at(14), at(15)), rank(1, at(14), at(15))],
}


@pytest.mark.parametrize("name", FINDINGS)
def test_every_finding_makes_rows(name: str) -> None:
    seen = picture(*FINDINGS[name])
    shown = OutsideView(seen, NOW_S)
    assert name in (seen.finding.what, "backward")
    assert len(shown.ranks()) == len(FINDINGS[name])
    assert bool(shown.verdicts()) is (shown.headline().severity is Severity.CRITICAL)
    job = shown.job()
    assert job is not None
    assert (job.state, job.job_id, job.detail) == ("running", "train.py", "started by torchrun, not by rankdeck")
    assert shown.still().headline() == shown.headline()


def test_a_rank_that_has_ended_shows_no_step_where_none_is_known() -> None:
    (row,) = view(rank(0, inside("join")[:1], state="")).ranks()
    facts = ["".join(segment.text for segment in line.segments).split() for line in fact_lines(Look(), row, 80)]
    assert [fact for fact in facts if fact[0] == "step"] == [["step", UNKNOWN]]


def test_ranks_that_are_found_by_their_environment_are_said_to_be() -> None:
    job = SeenJob("k", "RANK", 1, [rank(0, at(14))])
    shown = OutsideView(Picture(job, ["h1"], {"h1": NOW_S}, {}), NOW_S).job()
    assert shown is not None
    assert shown.detail == "found by its environment (RANK), not started by rankdeck"


def test_a_job_of_rankdeck_is_named_as_that() -> None:
    seen = picture(rank(0, at(14), own_job="beside"))
    row = OutsideView(seen, NOW_S).job()
    assert row is not None
    assert row.detail == "job beside of rankdeck"
    heading = job_lines(seen.job, seen.standings, seen.finding)[0]
    assert heading.startswith("train.py, job beside of rankdeck: 1 of ")


def test_jobs_of_one_name_are_told_apart_by_what_differs_and_others_are_left_alone() -> None:
    def job(pid: int, directory: str, port: int, program: str = "train.py") -> SeenJob:
        one = rank(0, at(14), pid=pid, directory=directory)
        return SeenJob(f"gpu1:{port}", "torchrun", 1, [msgspec.structs.replace(one, program=program)])

    first, second, third = job(7, "/a", 29500), job(8, "/b", 29500), job(9, "/a", 29501, "other.py")
    assert distinction(first, [first, second, third]) == "pid 7 on h1, in /a"
    assert distinction(second, [first, second, job(10, "/b", 29501)]) == "pid 8 on h1, in /b, store gpu1:29500"
    assert distinction(third, [first, second, third]) == ""
    assert distinction(first, [job(7, "/a", 29500)]) == "", "it is the same job, as it was seen later"
    shown = OutsideView(Picture(first, ["h1"], {"h1": NOW_S}, {}, "job 1 of 2: pid 7 on h1, in /a"), NOW_S)
    assert shown.company_texts == ["job 1 of 2: pid 7 on h1, in /a", "job 1 of 2: pid 7 on h1"]


@pytest.mark.parametrize(
    ("how", "text"), [("torchrun", "started by torchrun"), ("RANK", "found by its environment (RANK)")]
)
def test_the_printed_heading_names_how_the_job_was_started_and_what_distinguishes_it(how: str, text: str) -> None:
    seen = picture(rank(0, at(14)))
    job = SeenJob("k", how, 1, seen.job.ranks)
    heading = job_lines(job, seen.standings, seen.finding, "pid 100 on h1, in /a")[0]
    assert heading.startswith(f"train.py, {text}, pid 100 on h1, in /a: 1 of 1 rank on h1, seen from outside 3 times")


def test_a_job_whose_ranks_have_all_ended_is_over_and_no_alarm() -> None:
    shown = view(rank(0, WAITS, state=""), rank(1, WAITS, state="Z"))
    job = shown.job()
    assert job is not None
    assert job.state == "ended"
    assert shown.headline().severity is Severity.QUIET
    assert shown.verdicts() == []
    assert [node.num_running for node in shown.nodes()] == [0]


def test_a_host_that_cannot_be_looked_at_says_why() -> None:
    seen = picture(rank(0, WAITS), h2=UnreachableReason("no py-spy"))
    assert [node.trouble for node in OutsideView(seen, NOW_S).nodes()] == ["", "no py-spy"]
    assert list(cluster_of(["h1"], {}).nodes) == ["h1"]


def test_stacks_are_grouped_with_the_call_but_without_a_number() -> None:
    ranks = [
        rank(0, WAITS),
        rank(1, at(14)),
        rank(2, WAITS, host="h2"),
        rank(3, WAITS, state="T"),
        rank(4, [], state=""),
    ]
    groups = picture_of(picture(*ranks).stacks()).groups
    assert [heading_text(group) for group in groups] == [
        "rank 1 (1 rank): at load.py:14 in read",
        "rank 3 (1 rank): frozen at train.py:30 in main",
        "rank 4 (1 rank): its process has ended",
        "ranks 0, 2 (2 ranks): waiting in all_reduce, at train.py:30 in main",
    ]
    assert [frame.is_own for frame in groups[-1].frames] == [False, False, True, True]
    assert groups[-1].frames[0].file == C10D
    assert groups[-1].frames[-1].line == MODULE.line


def test_ranks_are_filtered_and_sorted_by_what_their_rows_show() -> None:
    table = view(rank(0, WAITS, seconds=3), rank(1, at(14)), rank(2, WAITS, seconds=9)).rank_table
    assert table is not None
    assert in_order(table, np.arange(3), RankOrder.WAIT).tolist() == [2, 0, 1]
    assert np.isnan(table.rss_bytes).all()
    assert [STATES[code] for code in table.states] == ["waiting", "missing", "waiting"]


def test_what_could_not_be_seen_is_a_note_of_the_job() -> None:
    following = Following()
    following.put("h1", HostSeen([rank(0, WAITS)], {"bob": 2}, "ada", is_root=False, yama=None))
    (text,) = following.unseen_lines()
    assert "2 of bob" in text
    seen = Picture(following.jobs({})[0], ["h1"], {"h1": NOW_S}, {}, unseen=[text])
    job = OutsideView(seen, NOW_S).job()
    assert job is not None
    assert job.notes == [text]


def test_targets_are_the_processes_that_have_not_ended() -> None:
    seen = picture(rank(0, WAITS, state="T", start=7), rank(1, WAITS, host="h2"), rank(2, WAITS, state=""))
    found = [(one.host, one.pid, one.start, one.rank, one.is_stopped) for one in seen.targets()]
    assert found == [("h1", 100, 7, 0, True), ("h2", 101, 0, 1, False)]


def test_a_step_and_an_epoch_are_told_apart_and_absurd_ones_are_not_known() -> None:
    rows = view(
        rank(0, [SeenFrame("/home/u/train.py", 3, "main", {"epoch": 2, "i": 7})]),
        rank(1, [SeenFrame("/home/u/train.py", 3, "main", {"epoch": 2})]),
        rank(2, [SeenFrame("/home/u/train.py", 3, "main", {"step": 2**80})]),
    ).ranks()
    assert [(row.step, row.epoch) for row in rows] == [(7, 2), (None, 2), (None, None)]


def test_a_world_larger_than_any_is_no_job() -> None:
    following = Following()
    following.put("h1", host(rank(2**18, WAITS)))
    assert following.jobs({}) == []


def test_jobs_of_rankdeck_are_left_out_and_two_others_are_told_apart() -> None:
    following = Following()
    following.put("h1", host(rank(0, WAITS), rank(1, WAITS, pid=7, key="own"), rank(0, WAITS, pid=8, key="own")))
    following.put("h2", host(rank(1, WAITS), rank(0, WAITS, key="other")))
    jobs = following.jobs({"h1": {8}, "h2": {100}})
    assert [[(one.host, one.pid) for one in job.ranks] for job in jobs] == [[("h1", 100), ("h2", 101)]]
    jobs = following.jobs({"h1": {8}})
    assert [(job.name, len(job.ranks)) for job in jobs] == [("k", 2), ("other", 1)]
