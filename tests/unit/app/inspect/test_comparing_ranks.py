"""Who holds up whom, from what a few looks from outside have shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.causes import Severity
from app.inspect.comparison import Finding, Standing, What, finding_of, standing_of
from app.inspect.inspection_text import job_lines, job_object, sentence, unseen_lines
from app.inspect.seen import HostSeen, Look, SeenChild, SeenFrame, SeenJob, SeenRank

TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
MAIN = SeenFrame("/home/u/train.py", 30, "main", {"step": 57})
MODULE = SeenFrame("/home/u/train.py", 40, "<module>", {})


def inside(*names: str, file: str = C10D, own: SeenFrame = MAIN, **numbers: int) -> list[SeenFrame]:
    """Return a stack: functions of a file, innermost first, under a line of the program."""
    return [*(SeenFrame(file, 9, name, dict(numbers)) for name in names), own, MODULE]


def at(line: int, step: int = 57, file: str = "/home/u/load.py") -> list[SeenFrame]:
    return [SeenFrame(file, line, "read", {"step": step}), MODULE]


WAITS = inside("all_reduce", "wrapper")
BACKWARD = inside("_engine_run_backward", "backward", file=f"{TORCH}/autograd/graph.py")


def rank(number: int, *stacks: list[SeenFrame], state: str = "S", **fields: Any) -> SeenRank:
    """Return a rank with a look a second; the last stack stays."""
    cpu_s, switches_hz = fields.pop("cpu_s", 0.0), fields.pop("switches_hz", 0)
    looks = [
        Look(
            frames=stacks[min(second, len(stacks) - 1)],
            trouble=fields.get("trouble", ""),
            at_s=float(second),
            state=state,
            cpu_s=cpu_s * second,
            switches=switches_hz * second,
            wchan=fields.get("wchan", "hrtimer_nanosleep"),
        )
        for second in range(3)
    ]
    return SeenRank(
        100 + number,
        fields.get("age_s", 900.0),
        0,
        "train.py",
        number,
        4,
        "torchrun",
        "k",
        looks,
        fields.get("children", []),
        fields.get("host", "h1"),
    )


def found(*ranks: SeenRank, size: int = 0) -> tuple[Finding, str]:
    job = SeenJob("k", "torchrun", size or len(ranks), list(ranks))
    finding = finding_of(job, [standing_of(one) for one in ranks])
    return finding, sentence(job, finding)


def culprits(finding: Finding) -> list[int]:
    return [one.rank.rank for one in finding.culprits]


def test_the_rank_that_stands_elsewhere_is_named_with_its_line() -> None:
    finding, text = found(rank(0, WAITS), rank(1, at(14)), rank(2, WAITS), rank(3, WAITS))

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.CRITICAL, [1])
    assert text == (
        "rank 1 has not come to the call in which others wait: it stands at load.py:14 in read (sleeps, 0 % CPU, "
        "step=57); ranks 0, 2-3 wait in all_reduce at train.py:30 in main"
    )


@pytest.mark.parametrize("stacks", [[at(14, 57), at(14, 60)], [at(14), at(15), at(16)]])
def test_a_rank_that_moves_is_no_alarm(stacks: list[list[SeenFrame]]) -> None:
    finding, text = found(rank(0, *stacks), rank(1, WAITS))

    assert (finding.what, finding.severity, culprits(finding)) == (What.ELSEWHERE, Severity.WARNING, [0])
    assert "rank 0 has not come to it, no alarm while it moves" in text


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


def test_a_rank_that_no_host_has_shown_is_named() -> None:
    finding, text = found(rank(0, WAITS), rank(2, WAITS), size=4)

    assert finding.what is What.MISSING
    assert text.startswith("ranks 1, 3 are not there: ended, or on a host that was not looked at; ranks 0, 2 wait")


def test_all_in_one_call_is_nobody_s_fault() -> None:
    finding, text = found(rank(0, WAITS), rank(1, WAITS))

    assert (finding.what, culprits(finding)) == (What.SAME_CALL, [])
    assert "arguments that cannot be seen from outside" in text


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
    joins = inside("_create_c10d_store", "init_process_group")
    finding, text = found(rank(0, joins), rank(1, at(3)))

    assert culprits(finding) == [1]
    assert "rank 0 waits in init_process_group" in text


def test_a_rank_that_has_just_started_may_be_late() -> None:
    joins = inside("_create_c10d_store", "init_process_group")
    finding, text = found(rank(0, joins), rank(1, at(3), age_s=20.0))

    assert finding.severity is Severity.WARNING
    assert "rank 1 has not come to it, and it has just started" in text


def test_a_process_that_outlives_its_program_is_named() -> None:
    ending = [SeenFrame("/usr/lib/python3.11/threading.py", 1553, "_shutdown", {})]
    finding, text = found(rank(0, [], state="Z"), rank(1, ending))

    assert (finding.what, culprits(finding)) == (What.NOT_EXITING, [1])
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
