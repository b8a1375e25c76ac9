"""Who holds up whom, from what a few looks from outside have shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.causes import Severity
from app.inspect.comparison import Finding, Standing, What, finding_of, standing_of
from app.inspect.inspection_text import job_lines, job_object, sentence, unseen_lines
from app.inspect.seen import HostSeen, SeenChild, SeenFrame, SeenJob, SeenRank
from tests.support.seen_ranks import BACKWARD, C10D, MAIN, MODULE, TORCH, WAITS, at, inside, rank


def found(*ranks: SeenRank, size: int = 0) -> tuple[Finding, str]:
    job = SeenJob("k", "torchrun", size or len(ranks), list(ranks))
    finding = finding_of(job, [standing_of(one) for one in ranks])
    return finding, sentence(job, finding)


def culprits(finding: Finding) -> list[int]:
    return [one.rank.rank for one in finding.culprits]


def test_the_rank_that_stands_elsewhere_is_named_with_its_line() -> None:
    finding, text = found(rank(0, WAITS), rank(1, at(14), asleep_s=9.0), rank(2, WAITS), rank(3, WAITS))

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.CRITICAL, [1])
    assert text == (
        "rank 1 has not come to the call in which others wait: it stands at load.py:14 in read (sleeps, 0 % CPU, "
        "step=57); ranks 0, 2-3 wait in all_reduce at train.py:30 in main"
    )


HELPED = [[SeenFrame("/home/u/load.py", 3, "parse", {}), *at(15)], at(15)]
STORED = [[SeenFrame(f"{TORCH}/serialization.py", line, "save", {}), *at(15)] for line in (8, 9)]


@pytest.mark.parametrize("stacks", [[at(14, 57), at(14, 60)], [at(14, 57), at(15, 60)], HELPED, STORED])
@pytest.mark.parametrize("seconds", [2, 40])
def test_a_rank_that_moves_is_no_alarm(stacks: list[list[SeenFrame]], seconds: int) -> None:
    finding, text = found(rank(0, *stacks, cpu_s=1.0, seconds=seconds), rank(1, WAITS, asleep_s=90.0, seconds=seconds))

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.WARNING, [0])
    assert "rank 0 has not come to it, no alarm while it moves" in text


LOOP = [at(14), at(15), at(16)] * 30


@pytest.mark.parametrize(("seconds", "asleep_s", "more_looks"), [(2, 5.0, 31), (20, 21.0, 33), (2, 300.0, 12)])
def test_a_rank_that_runs_within_one_function_may_have_work_there(
    seconds: int, asleep_s: float, more_looks: int
) -> None:
    finding, text = found(
        rank(0, *LOOP, cpu_s=1.0, seconds=seconds), rank(1, WAITS, asleep_s=asleep_s, seconds=seconds)
    )

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.WARNING, [0])
    assert "rank 0 has not come to it, and may have work there: it runs within one function, at load.py:" in text
    assert text.endswith(f"no alarm yet; to be sure, look longer: --looks {more_looks}")


@pytest.mark.parametrize(("seconds", "asleep_s", "waited"), [(11, 300.0, "5 min"), (33, 33.0, "33 s")])
def test_a_loop_without_an_end_is_an_alarm_once_the_others_have_waited_long(
    seconds: int, asleep_s: float, waited: str
) -> None:
    finding, text = found(
        *(rank(number, WAITS, asleep_s=asleep_s, seconds=seconds) for number in range(3)),
        rank(3, *LOOP, state="R", cpu_s=1.0, seconds=seconds),
    )

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.CRITICAL, [3])
    assert text.startswith("rank 3 has not come to the call in which others wait: it runs within one function, at load")
    assert "(runs, 100 % CPU, step=57)" in text
    assert text.endswith(f"ranks 0-2 wait in all_reduce at train.py:30 in main for {waited}")


@pytest.mark.parametrize("how", [{"io_hz": 1 << 20}, {"switches_hz": 40}])
def test_a_loop_that_reads_or_sleeps_again_and_again_is_no_alarm(how: dict[str, Any]) -> None:
    finding, text = found(rank(0, *LOOP, seconds=40, **how), rank(1, WAITS, asleep_s=90.0, seconds=40))

    assert finding.severity is Severity.WARNING
    assert "no alarm while it moves" in text


GIVES_UP_THE_GIL: dict[str, Any] = {"switches_hz": 15, "wanted_frac": 0.97, "cpu_s": 0.49, "state": "R"}
"""A loop beside a thread of Python, as rankdeck's probe is one, on a busy machine."""
IN_SCRIPT = [SeenFrame("/home/u/tl.py", 9, "<module>", {})]


@pytest.mark.parametrize(
    ("stacks", "where"),
    [
        ([at(14)], "it runs within one function, at load.py:14 in read (runs, 49 % CPU, step=57)"),
        (LOOP, "it runs within one function, at load.py:16 in read (runs, 49 % CPU, step=57)"),
        ([IN_SCRIPT], "it runs within the script itself, at tl.py:9 in <module> (runs, 49 % CPU)"),
    ],
)
def test_a_loop_that_hands_the_gil_to_other_threads_is_an_alarm(stacks: list[list[SeenFrame]], where: str) -> None:
    sure, text = found(rank(0, *stacks, seconds=11, **GIVES_UP_THE_GIL), rank(1, WAITS, asleep_s=48.0, seconds=11))
    assert (sure.severity, culprits(sure)) == (Severity.CRITICAL, [0])
    assert where in text

    early, text = found(rank(0, *stacks, seconds=11, **GIVES_UP_THE_GIL), rank(1, WAITS, asleep_s=20.0, seconds=11))
    assert (early.severity, culprits(early)) == (Severity.WARNING, [0])
    assert text.endswith("no alarm yet; to be sure, look longer: --looks 25")


COUNTS = [[SeenFrame("/home/u/load.py", 3, "parse", {"i": number}), MAIN, MODULE] for number in range(40)]
MISREAD = [COUNTS[3] if number % 4 == 2 else COUNTS[number] for number in range(33)] + [COUNTS[1]]
"""Where a quarter of the looks has read an integer that was freed meanwhile."""
IN_LIBRARY = [SeenFrame(f"{TORCH}/serialization.py", 9, "save", {}), *at(15)]


@pytest.mark.parametrize(
    ("stacks", "how"),
    [
        ([at(14)], {**GIVES_UP_THE_GIL, "wanted_frac": 0.3}),
        ([at(14)], {**GIVES_UP_THE_GIL, "wanted_frac": None}),
        ([at(14)], {**GIVES_UP_THE_GIL, "io_hz": 1 << 20}),
        ([IN_LIBRARY], GIVES_UP_THE_GIL),
        (COUNTS, GIVES_UP_THE_GIL),
        (COUNTS, {"state": "R", "cpu_s": 1.0}),
        (MISREAD, GIVES_UP_THE_GIL),
    ],
)
def test_a_rank_that_may_go_on_is_no_alarm_and_a_later_look_tells_more(
    stacks: list[list[SeenFrame]], how: dict[str, Any]
) -> None:
    finding, text = found(rank(0, *stacks, seconds=33, **how), rank(1, WAITS, asleep_s=90.0, seconds=33))

    assert (finding.severity, culprits(finding)) == (Severity.WARNING, [0])
    assert "rank 0 has not come to it, no alarm while it moves" in text
    assert text.endswith("; inspect again in some minutes: a rank that is still there then may never come")
    _, text = found(rank(0, *stacks, seconds=33, **how), rank(1, WAITS, asleep_s=20.0, seconds=33))
    assert "inspect again" not in text


def test_a_number_that_rises_in_an_inner_loop_is_shown_and_one_that_falls_as_well_is_a_loop() -> None:
    _, text = found(rank(0, *COUNTS, seconds=33, state="R"), rank(1, WAITS, asleep_s=90.0, seconds=33))
    assert "(runs, 0 % CPU, i=0 to i=33)" in text

    falls = [COUNTS[number % 7] for number in range(33)] + [COUNTS[9]]
    finding, text = found(rank(0, *falls, seconds=33, cpu_s=1.0), rank(1, WAITS, asleep_s=90.0, seconds=33))
    assert (finding.severity, culprits(finding)) == (Severity.CRITICAL, [0])


def test_a_step_that_not_every_look_has_shown_is_told_without_a_gap() -> None:
    _, text = found(rank(0, at(14), SAVES[:1], seconds=9), rank(1, WAITS, asleep_s=9.0, seconds=9))
    assert "0 % CPU, step=57)" in text


def test_a_loop_beside_another_rank_that_moves_is_no_alarm() -> None:
    ranks = [rank(0, *LOOP, seconds=40), rank(1, *HELPED, seconds=40), rank(2, WAITS, seconds=40)]
    finding, _ = found(*ranks)

    assert (finding.severity, culprits(finding)) == (Severity.WARNING, [0, 1])


@pytest.mark.parametrize("asleep_s", [0.2, 4.0])
def test_ranks_that_come_to_a_call_again_and_again_have_not_waited_for_as_long_as_they_were_seen(
    asleep_s: float,
) -> None:
    finding, text = found(
        rank(0, *LOOP, state="R", cpu_s=1.0, seconds=60),
        *(rank(number, WAITS, asleep_s=asleep_s, seconds=60) for number in (1, 2)),
    )

    assert (finding.severity, culprits(finding)) == (Severity.WARNING, [0])
    assert " for 1 min" not in text


def test_a_rank_at_another_line_than_those_at_their_gpus_is_no_alarm() -> None:
    """Healthy ranks of a script without functions stand where they wait for their GPUs nearly always."""
    next_line = [msgspec.structs.replace(MAIN, line=31), MODULE]
    finding, text = found(
        on_gpu(0, *[ITEM, next_line, ITEM] * 20, seconds=60), *(on_gpu(number, ITEM, seconds=60) for number in (1, 2))
    )
    assert culprits(finding) == [0]

    assert finding.severity is Severity.WARNING, text


def test_a_frozen_rank_comes_first() -> None:
    finding, text = found(rank(0, WAITS), rank(1, at(3)), rank(2, WAITS, state="T"))

    assert (finding.what, culprits(finding)) == (What.FROZEN, [2])
    assert text.startswith("rank 2 is frozen (SIGSTOP) at train.py:30 in main")


def test_ranks_in_different_calls_are_all_shown_and_the_fewest_named() -> None:
    finding, text = found(rank(0, inside("barrier")), rank(1, BACKWARD), rank(2, BACKWARD))

    assert (finding.what, culprits(finding)) == (What.MISMATCH, [0])
    assert "rank 0 waits in barrier" in text
    assert "ranks 1-2 wait in backward" in text


def test_the_same_call_with_another_source_is_a_difference() -> None:
    finding, text = found(rank(0, inside("broadcast", src=0)), rank(1, inside("broadcast", src=1)))

    assert (finding.what, culprits(finding)) == (What.MISMATCH, [0, 1])
    assert "the same call with different arguments" in text
    assert "broadcast(src=1)" in text


SAVES = [SeenFrame(f"{TORCH}/serialization.py", 9, "save", {}), *at(80)]
SECONDS = pytest.mark.parametrize(("seconds", "severity"), [(2, Severity.WARNING), (11, Severity.CRITICAL)])


@pytest.mark.parametrize(
    "how", [{}, {"asleep_s": 7.0}, {"cpu_s": 1.0}, {"cpu_s": 1.0, "asleep_s": 9.0}, {"stacks": [SAVES], "state": "D"}]
)
@SECONDS
def test_a_rank_that_may_have_work_elsewhere_is_an_alarm_only_after_longer(
    how: dict[str, Any], seconds: int, severity: Severity
) -> None:
    fields = {key: value for key, value in how.items() if key != "stacks"}
    one = rank(1, *how.get("stacks", [at(14)]), seconds=seconds, **fields)
    finding, text = found(rank(0, WAITS, seconds=seconds), one)

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, severity, [1])
    assert ("no alarm yet; to be sure, look longer: --looks 12" in text) is (severity is Severity.WARNING)


@pytest.mark.parametrize("state", ["S", "D"])
def test_a_rank_that_writes_its_checkpoint_is_never_an_alarm(state: str) -> None:
    one = rank(1, SAVES, seconds=30, state=state, io_hz=1 << 20)
    finding, text = found(rank(0, WAITS, seconds=30), one)

    assert (finding.severity, culprits(finding)) == (Severity.WARNING, [1])
    assert "no alarm while it moves" in text
    assert "--looks" not in text


def test_of_ranks_elsewhere_the_one_at_rest_is_named() -> None:
    finding, _ = found(
        rank(0, WAITS), rank(1, at(14), cpu_s=1.0), rank(2, at(15), asleep_s=9.0), rank(3, at(16), at(17))
    )

    assert (finding.severity, culprits(finding)) == (Severity.CRITICAL, [2])


def test_a_rank_that_no_host_has_shown_is_named_but_may_run_where_nobody_looked() -> None:
    finding, text = found(rank(0, WAITS), rank(2, WAITS), size=4)

    assert (finding.what, finding.severity) == (What.MISSING, Severity.WARNING)
    assert text == (
        "ranks 1, 3 are not there: ended, or on a host that was not looked at; ranks 0, 2 wait in all_reduce at "
        "train.py:30 in main"
    )
    finding, _ = found(rank(0, WAITS), rank(1, [], state="Z"))
    assert (finding.what, finding.severity, culprits(finding)) == (What.MISSING, Severity.CRITICAL, [1])


@SECONDS
def test_all_in_one_call_is_nobody_s_fault_and_may_be_a_long_call(seconds: int, severity: Severity) -> None:
    finding, text = found(rank(0, WAITS, seconds=seconds), rank(1, WAITS, seconds=seconds))

    assert (finding.what, finding.severity, culprits(finding)) == (What.SAME_CALL, severity, [])
    why = "the network, or arguments that cannot be seen from outside"
    assert text.startswith(f"both ranks wait in all_reduce at train.py:30 in main: {why}")


ITEM = [MAIN, MODULE]
"""`loss.item()` has no frame of its own."""


def on_gpu(number: int, *stacks: list[SeenFrame], seconds: int = 2, cpu_s: float = 1.0) -> SeenRank:
    return rank(number, *stacks, seconds=seconds, cpu_s=cpu_s, uses_gpu=True, asleep_s=None if cpu_s else 9.0)


def test_ranks_at_item_wait_for_their_gpus_and_the_one_at_rest_is_named() -> None:
    finding, text = found(on_gpu(0, ITEM), on_gpu(1, at(14), cpu_s=0.0), on_gpu(2, ITEM))

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.CRITICAL, [1])
    assert text.endswith("ranks 0, 2 wait for their GPUs at train.py:30 in main")


JOINS = inside("_create_c10d_store", "init_process_group")


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (on_gpu(0, ITEM, seconds=30), "waits for its GPU at {}: a kernel on it does not end, or runs long"),
        (on_gpu(0, BACKWARD, cpu_s=0.0), "waits in backward at {}: a kernel on its GPU does not end, or runs long"),
        (rank(0, WAITS, seconds=30), "waits in all_reduce at {}: a lock, or another thread, holds it up"),
        (rank(0, JOINS), "waits in init_process_group at {}: the store does not answer"),
    ],
)
def test_one_rank_alone_waits_for_no_other_rank_and_is_no_alarm(one: SeenRank, text: str) -> None:
    finding, told = found(one)

    assert (finding.severity, told) == (Severity.WARNING, f"rank 0 {text.format('train.py:30 in main')}")


@pytest.mark.parametrize("others", [ITEM, inside("synchronize", file=f"{TORCH}/cuda/__init__.py")])
def test_healthy_ranks_with_long_steps_stand_at_their_gpus(others: list[SeenFrame]) -> None:
    finding, text = found(on_gpu(0, ITEM, seconds=11), on_gpu(1, others, seconds=11))
    assert finding.severity is Severity.WARNING
    assert text.endswith("look longer: --looks 34")

    finding, _ = found(on_gpu(0, ITEM, seconds=33), on_gpu(1, others, seconds=33))
    assert finding.severity is Severity.CRITICAL


def test_many_ranks_at_their_gpus_are_one_subject() -> None:
    _, text = found(*(on_gpu(number, ITEM) for number in range(4)))

    assert text.startswith("all 4 ranks wait for their GPUs at train.py:30 in main: the network, or arguments")


def test_a_rank_at_rest_among_ranks_that_compute_is_told_though_none_waits() -> None:
    finding, text = found(*(rank(number, ITEM, cpu_s=1.0) for number in range(3)), rank(3, at(14)))

    assert (finding.what, finding.severity, culprits(finding)) == (What.STANDING, Severity.WARNING, [3])
    assert text.startswith("some ranks stand, and none waits in a call that needs others; rank 3 stands at load.py:14")
    assert text.endswith("look longer: --looks 12")
    longer, _ = found(*(rank(number, ITEM, cpu_s=1.0, seconds=11) for number in range(3)), rank(3, at(14), seconds=11))
    assert (longer.severity, culprits(longer)) == (Severity.CRITICAL, [3])
    moving = [rank(number, ITEM, at(3), cpu_s=1.0, seconds=11) for number in range(3)]
    assert found(*moving, rank(3, at(14), seconds=11))[0].severity is Severity.WARNING


def test_a_rank_under_a_debugger_is_not_taken_for_one_that_was_stopped() -> None:
    _, text = found(rank(0, WAITS), rank(1, at(3), state="t"))

    assert text.startswith("rank 1 is stopped by a debugger or tracer at load.py:3 in read")


def test_all_at_one_line_is_a_standstill_and_the_odd_one_is_named() -> None:
    together, _ = found(rank(0, at(14)), rank(1, at(14)))
    apart, text = found(rank(0, at(14)), rank(1, at(14)), rank(2, at(20)))

    assert (together.what, together.severity, culprits(together)) == (What.STANDSTILL, Severity.WARNING, [])
    assert (apart.what, culprits(apart)) == (What.STANDSTILL, [2])
    assert text.endswith("to be sure, look longer: --looks 12")
    assert "rank 2 stands at load.py:20 in read" in text


@pytest.mark.parametrize("how", [{"switches_hz": 40}, {"cpu_s": 0.9}])
def test_ranks_that_train_are_never_an_alarm(how: dict[str, Any]) -> None:
    stacks = [BACKWARD, BACKWARD]
    finding, _ = found(rank(0, *stacks, **how), rank(1, *stacks, **how))

    assert finding.severity is Severity.OK


def test_a_rank_that_joins_waits_and_one_before_it_is_named() -> None:
    finding, text = found(rank(0, JOINS), rank(1, at(3)))

    assert culprits(finding) == [1]
    assert "rank 0 waits in init_process_group" in text


def test_for_how_long_a_rank_has_stood_is_known_from_two_looks() -> None:
    finding, text = found(rank(0, WAITS, asleep_s=7380.0), rank(1, at(14), asleep_s=7380.0))

    assert finding.severity is Severity.CRITICAL
    assert "rank 1 has not come to the call in which others wait: it stands at load.py:14 in read" in text
    assert "(sleeps for 2 h 3 min, 0 % CPU, step=57)" in text
    assert found(*(rank(number, WAITS, asleep_s=9.0) for number in range(2)))[0].severity is Severity.CRITICAL


def test_a_rank_that_polls_a_child_stands_as_long_as_the_child_does() -> None:
    look = rank(9, at(8), asleep_s=60.0).looks[0]
    child = SeenChild(**{name: getattr(look, name) for name in look.__struct_fields__}, pid=77, name="python")
    finding, _ = found(rank(0, WAITS), rank(1, at(14), asleep_s=1.0, children=[child]))

    assert (finding.severity, culprits(finding)) == (Severity.CRITICAL, [1])


def test_where_each_waits_for_the_next_all_are_named() -> None:
    ranks = [rank(number, inside("recv", src=(number - 1) % 4), asleep_s=9.0) for number in range(4)]
    finding, _ = found(*ranks)

    assert (finding.what, finding.severity, culprits(finding)) == (What.MISMATCH, Severity.CRITICAL, [0, 1, 2, 3])


def test_a_rank_that_has_just_started_may_be_late() -> None:
    finding, text = found(rank(0, JOINS), rank(1, at(3), age_s=20.0))

    assert finding.severity is Severity.WARNING
    assert "rank 1 has not come to it, and it has just started" in text


def test_a_process_that_outlives_its_program_is_named() -> None:
    ending = [SeenFrame("/usr/lib/python3.11/threading.py", 1553, "_shutdown", {})]
    assert found(rank(0, [], state="Z"), rank(1, ending))[0].severity is Severity.WARNING
    finding, text = found(rank(0, [], state="Z"), rank(1, ending, seconds=11))

    assert (finding.what, finding.severity, culprits(finding)) == (What.NOT_EXITING, Severity.CRITICAL, [1])
    assert text.startswith("rank 1 has finished the program, and its process does not end")


def test_a_child_that_a_rank_waits_for_is_shown() -> None:
    look = rank(9, at(8, file="/home/u/data.py")).looks[0]
    child = SeenChild(
        frames=look.frames, trouble="", at_s=0, state="S", cpu_s=0, switches=0, wchan="", pid=77, name="python"
    )
    _, text = found(rank(0, WAITS), rank(1, at(14), children=[child]))

    assert "its child python (pid 77) is at data.py:8 in read" in text


def test_a_stack_that_cannot_be_read_is_said_with_what_would_help() -> None:
    one = rank(1, [], trouble="Permission denied (os error 13)")
    finding, text = found(rank(0, [], trouble="Permission denied (os error 13)"), one)
    host = HostSeen(ranks=[one], unseen={"alice": 3}, user="bob", is_root=False, yama=1)

    assert (finding.what, finding.severity) == (What.UNSEEN, Severity.WARNING)
    assert "Permission denied" in text
    assert unseen_lines({"h1": host}) == [
        "h1: Python processes of other users cannot be looked at: 3 of alice (log in as them or root)",
        "h1: the kernel lets only root read stacks (sudo sysctl kernel.yama.ptrace_scope=0)",
    ]


NAMES = st.sampled_from(
    ["all_reduce", "barrier", "backward", "read", "_sync_buffers", "init_process_group", "\x1b[2J", ""]
)
FRAMES = st.lists(
    st.builds(
        SeenFrame,
        st.sampled_from([C10D, "/home/u/train.py", f"{TORCH}/nn/parallel/distributed.py", "<string>", "\x1b]0;x"]),
        st.integers(0, 9),
        NAMES,
        st.dictionaries(st.sampled_from(["step", "i", "src"]), st.integers(0, 99), max_size=2),
    ),
    max_size=4,
)
RANKS = st.lists(
    st.tuples(st.lists(FRAMES, min_size=1, max_size=3), st.sampled_from("RSDTZ"), st.sampled_from([0.0, 0.9])),
    min_size=1,
    max_size=5,
)


@given(RANKS)
def test_whatever_is_seen_is_told_cleanly_and_names_no_rank_that_waits_for_another(rows: list[Any]) -> None:
    ranks = [rank(number, *stacks, state=state, cpu_s=cpu) for number, (stacks, state, cpu) in enumerate(rows)]
    job = SeenJob("k", "torchrun", len(ranks), ranks)
    standings: list[Standing] = [standing_of(one) for one in ranks]
    finding = finding_of(job, standings)
    text = "\n".join(job_lines(job, standings, finding))

    assert "\x1b" not in text
    assert job_object(job, standings, finding)["text"] == sentence(job, finding)
    if finding.what in (What.ELSEWHERE, What.FROZEN, What.MISSING):
        assert not any(one.is_waiting for one in finding.culprits)
    if finding.severity is Severity.OK:
        assert finding.culprits == []
