"""What a person reads: problems first, each with what to do, within the terminal's width."""

from __future__ import annotations

import msgspec
import pytest

from agent.wire.examination import Health, Row
from app.errors import ExitCode
from app.preflight.comparison import compare
from app.preflight.findings import Answers, ClockDifference, Preflight, Wanted, cleaned
from app.preflight.report_lines import Tone, report_lines, summary_text
from tests.support.examinations import H1, H2, H3, answers, code, facts, failed, meshed

SMALL_SHM = Row("shared_memory", Health.WARN, "64 MiB at /dev/shm", "enlarge it")
FEW_FILES = Row("open_files", Health.WARN, "1024 (hard 1024)", "ulimit -n 65536")
FULL_DISK = Row(
    "disk", Health.BAD, "0 MiB free at /", "make room for logs and records, and for whatever else a job writes"
)


def text_of(found: Preflight, width: int = 80, *, shows_all: bool = False) -> list[str]:
    return ["".join(piece.text for piece in line) for line in report_lines(found, width, shows_all=shows_all)]


def test_hosts_that_are_well_are_a_table_and_two_sentences() -> None:
    lines = text_of(compare(meshed(*(answers(host, code=code()) for host in (H1, H2)))))

    assert lines == [
        "host  python  torch         NCCL    GPUs           code       driver",
        "h1    3.11.9  2.13.0+cu129  2.27.5  8 x H100 80GB  aaaaaaaaa  570.172.08",
        "h2    3.11.9  2.13.0+cu129  2.27.5  8 x H100 80GB  aaaaaaaaa  570.172.08",
        "",
        "Every host reaches every other (2 connections; the slowest 0.4 ms, h2 to h1).",
        "2 hosts: 2 well.",
    ]


def test_the_worst_comes_first_and_says_what_to_do() -> None:
    found = compare([answers(H1, SMALL_SHM), answers(H2, SMALL_SHM, FULL_DISK), failed(H3)])

    lines = text_of(found)

    assert lines[:12] == [
        "h2",
        "  BAD   disk             0 MiB free at /",
        "                         -> make room for logs and records, and for whatever",
        "                            else a job writes",
        "",
        "h3",
        "  BAD   reachable        it sleeps",
        "                         -> wake it",
        "",
        "every host that answers",
        "  warn  shared memory    64 MiB at /dev/shm",
        "                         -> enlarge it",
    ]
    assert lines[-1] == "3 hosts: 1 with warnings, 1 not fit, 1 could not be examined."


def test_hosts_of_which_the_same_is_said_come_together() -> None:
    found = compare([answers(H1, SMALL_SHM), answers(H2, FEW_FILES), answers(H3, SMALL_SHM)])

    titles = [line for line in text_of(found) if line and not line.startswith((" ", "host", "h1  ", "h2  ", "h3  "))]

    assert titles == ["h1, h3", "h2", "3 hosts: 3 with warnings."]


def test_what_is_of_all_hosts_together_has_a_section_of_its_own() -> None:
    found = compare([answers(H1), answers(H2, torch="2.12.0")])

    lines = text_of(found)

    assert lines[:3] == [
        "all hosts together",
        "  BAD   torch            2.13.0+cu129 on h1; 2.12.0 on h2",
        "                         -> install the same torch there: whichever it is",
    ]
    assert lines[-1] == "2 hosts: 2 well; of all together: 1 bad, 0 to look at."
    assert found.exit_code is ExitCode.JOB_FAILED


def test_what_is_well_is_said_where_that_is_wanted() -> None:
    lines = text_of(compare(meshed(answers(H1), answers(H2))), shows_all=True)

    assert any(line.startswith("  ok    torch            2.13.0+cu129") for line in lines)
    assert any(line.startswith("  ok    reach            every host reaches every other") for line in lines)
    assert not any(line.startswith("Every host") for line in lines)


def test_a_long_name_has_a_line_of_its_own() -> None:
    row = Row("something_very_long", Health.WARN, "so it is", "")

    lines = text_of(compare([answers(H1, row)]))

    assert lines[1:3] == ["  warn  something very long", " " * 25 + "so it is"]


def test_a_row_without_a_word_is_still_a_line() -> None:
    assert text_of(compare([answers(H1, Row("odd", Health.WARN, ""))]))[1] == "  warn  odd" + " " * 14


def test_without_an_answer_there_is_no_table() -> None:
    assert text_of(compare([failed(H1)]))[-2:] == ["", "1 host: 1 could not be examined."]
    assert summary_text(compare([failed(H1)])) == "1 host: 1 could not be examined."


@pytest.mark.parametrize("width", [10, 60, 80, 120, 300])
def test_a_line_is_as_wide_as_the_terminal_at_most(width: int) -> None:
    hosts = [answers(f"a-host-with-a-long-name-{number}", SMALL_SHM, code=code()) for number in range(12)]
    broken = {(hosts[0].host, hosts[1].host): "No route to host"}

    lines = text_of(compare(meshed(*hosts, broken=broken)), width, shows_all=True)

    assert max(map(len, lines)) <= min(120, max(60, width))
    assert len(lines) > 12


def test_the_table_tells_clocks_and_programs_and_cuts_what_is_long() -> None:
    hosts = [
        answers("h" * 30, clock=ClockDifference(-42.0, 0.1), code=code("", 0, "d" * 16), gpus=["x" * 20] * 2),
        answers(H2, clock=ClockDifference(0.02, 0.01), code=code("c" * 40, 2)),
        answers(H3, gpus=["A100", "NVIDIA H100 80GB HBM3"]),
    ]

    table = [line for line in text_of(compare(hosts), 120) if line.startswith(("h" * 5, "h2  ", "h3  "))][-3:]

    assert table[0].startswith("h" * 21 + "~  ")
    assert "  2 x xxxxxxxxxxx   ddddddddd   -42 s  " in table[0]
    assert "  ccccccccc+  same " in table[1]
    assert "  1 x A100, 1 x H~  -  " in table[2]


def test_colours_are_by_the_worst_of_a_host() -> None:
    found = compare([answers(H1), answers(H2, FULL_DISK), answers(H3, SMALL_SHM, FEW_FILES)])

    rows = [line for line in report_lines(found, 80) if len(line) == 2 and line[0].text.strip() in {H1, H2, H3}]
    assert [line[0].tone for line in rows] == [Tone.OK, Tone.BAD, Tone.WARN]
    *_, summary = report_lines(found, 80)
    assert [piece.tone for piece in summary] == [Tone.BAD]


def test_what_a_host_says_is_safe_to_show_and_never_longer_than_its_schema_takes() -> None:
    hostile = facts(H1, hostname="\x1b[2J" * 64, torch="\x1b]52;" * 12, gpus=["\u202e" * 256])
    examination = answers(H1, Row("\x07" * 256, Health.BAD, "\x1b" * 4096, "\u2066" * 4096)).examination
    assert examination is not None

    safe = cleaned(msgspec.structs.replace(examination, facts=hostile))

    assert msgspec.convert(msgspec.to_builtins(safe), type(safe)) == safe
    shown = "".join(text_of(compare([Answers(Wanted(H1), examination=safe)]), shows_all=True))
    assert shown.isprintable()


def test_this_machine_is_not_said_to_be_reached() -> None:
    here = msgspec.structs.replace(answers("localhost"), is_remote=False)

    assert not {"reachable", "host_key"} & {row.name for row in compare([here]).hosts[0].rows}
