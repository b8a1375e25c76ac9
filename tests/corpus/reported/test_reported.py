"""What users see of the programs that users report: one in each run, eleven are slow, the rest is for `-m reported`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.corpus.reported.scoring import Score
from tests.corpus.reported.table import PROGRAMS, line, play_and_score

if TYPE_CHECKING:
    from tests.corpus.reported.truth import Program

PATIENCE = 6.0
"""For a machine with other work, which also stands still now and then."""
IN_CI = [program for program in PROGRAMS if program.in_ci]
IN_EACH_RUN = "arguments.new_group_on_some"
REST = [program for program in PROGRAMS if not program.in_ci]


def test_there_are_sixty_with_a_source_beside_each() -> None:
    assert len(PROGRAMS) >= 60
    assert [program.name for program in PROGRAMS if not program.source.url.startswith("https://")] == []
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert len(IN_CI) == 12


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_lines_that_must_be_told_are_marked(program: Program) -> None:
    assert program.path.exists()
    assert len(program.patterns()) == len(program.is_reported)


@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name, marks=() if program.name == IN_EACH_RUN else pytest.mark.slow)
        for program in IN_CI
    ],
)
def test_what_is_shown_is_right(program: Program) -> None:
    assert_right(program)


@pytest.mark.reported
@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", REST, ids=lambda program: program.name)
def test_what_is_shown_of_the_rest_is_right(program: Program) -> None:
    assert_right(program)


def assert_right(program: Program) -> None:
    scored = play_and_score(program, PATIENCE)
    assert scored.score is Score.RIGHT, line(scored)
