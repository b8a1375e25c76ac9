"""A program that a person types: what it is, and what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.inventory.program import Program, Typed, read_program, start_question, typed, usual_workdir

WHOLE = Program(("train.py", "--name", "a b"), 8, 3, "~/project", "/opt/python")
LABEL = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def test_what_is_typed_is_read() -> None:
    assert read_program(Typed(" train.py --name 'a b' ", "8", "3", " ~/project", "/opt/python ")) == WHOLE
    assert read_program(Typed("-m pkg.train")) == Program(("-m", "pkg.train"))


@given(st.lists(LABEL, min_size=1).map(tuple), st.none() | st.integers(1, 4096), st.integers(0, 1000))
def test_a_program_is_what_is_typed_for_it(command: tuple[str, ...], num_ranks: int | None, max_restarts: int) -> None:
    program = Program(command, num_ranks, max_restarts)
    try:
        read = read_program(typed(program))
    except UsageError:
        assert "***" in program.text or "python" in command[0] or command[0] == "torchrun"
    else:
        assert read == program


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (Typed(), "type the program"),
        (Typed("  "), "type the program"),
        (Typed("train.py 'x"), "a quote is open"),
        (Typed("python train.py"), "leave python out: rankdeck run train.py"),
        (Typed("/usr/bin/python3.11 train.py"), "leave /usr/bin/python3.11 out: rankdeck run train.py"),
        (Typed("torchrun train.py"), "leave torchrun out: rankdeck run train.py"),
        (Typed("train.py --token ***"), "type it again"),
        (Typed("train.py --token=***"), "type it again"),
        (Typed("train.py --db https://u:***@h/x"), "type it again"),
        (Typed("train.py 'Authorization: Bearer ***'"), "type it again"),
        (Typed("train.py \udcff"), "not UTF-8"),
        (Typed("train.py", "0"), "0 ranks cannot be: 1 to 4096"),
        (Typed("train.py", "many"), "many ranks cannot be"),
        (Typed("train.py", "4097"), "4097 ranks cannot be"),
        (Typed("train.py", "", "-1"), "-1 restarts cannot be: 0 to 1000"),
        (Typed("train.py", "", "9" * 5000), "restarts cannot be"),
    ],
)
def test_what_cannot_be_is_said_with_what_to_type_instead(fields: Typed, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("*", r"\*")):
        read_program(fields)


def test_the_question_names_host_ranks_and_command() -> None:
    assert start_question("gpu1", WHOLE) == (
        "Start train.py --name 'a b' on gpu1 in ~/project? 8 ranks, with /opt/python; after a failure it restarts, "
        "3 times at most."
    )
    assert start_question("gpu1", Program(("a.py",), 1)) == "Start a.py on gpu1? 1 rank."
    assert "Ranks by the inventory's nproc, else one rank for each GPU" in start_question(
        "gpu1", Program(("a\x1b.py",))
    )
    assert "\x1b" not in start_question("gpu1", Program(("a\x1b.py",)))


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (["localhost"], "the inventory's, else this directory"),
        (["gpu1"], "the inventory's, else home"),
        (["gpu1", "localhost"], "the inventory's, else home; on localhost this directory"),
    ],
)
def test_it_is_said_where_a_program_runs_unless_it_is_told_otherwise(hosts: list[str], where: str) -> None:
    assert usual_workdir(hosts) == where
