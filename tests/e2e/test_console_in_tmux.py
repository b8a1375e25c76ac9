"""The console as a person sees it: a real terminal (tmux), real keys, real ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.terminals import Terminal, end_terminals
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 300.0
"""Two torchruns and four ranks on two cores, in a fresh environment whose modules are not compiled yet."""
LOOK_S = 60.0
"""What a key brings comes in a moment, and in more on a machine that stands still now and then."""

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"),
]


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house
        end_terminals(house.directory)


def test_a_person_freezes_a_rank_sees_it_named_thaws_it_and_quits(house: DemoHouse) -> None:
    terminal = Terminal(house.directory, house.environment, house.argv("--ranks", "2"), 120, 35)
    terminal.until_it_shows("step", START_S)
    until(lambda: len(house.ranks()) == 2, START_S, "two ranks")
    terminal.until_it_shows("training", START_S)

    house.ranks()[1].send_signal(signal.SIGSTOP)
    terminal.until_it_shows("rank 1 on demo-1 is frozen", LOOK_S, "bytegpt.py:")

    house.ranks()[1].send_signal(signal.SIGCONT)
    terminal.until_it_no_longer_shows("is frozen", LOOK_S)

    terminal.keys("C-z")
    terminal.until_it_shows("No shell has started this console", LOOK_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", LOOK_S)
    end_terminals(house.directory)
    house.assert_nothing_is_left()


def test_whoever_types_rankdeck_alone_where_no_cluster_is_reads_what_to_type_first(house: DemoHouse) -> None:
    terminal = Terminal(house.directory, house.environment, house.argv()[:-1], 80, 24)

    shown = terminal.until_it_shows("exit code 0", LOOK_S, "rankdeck demo").split("exit code")[0]

    assert len(shown.strip().splitlines()) == 10, "no line is broken"
    end_terminals(house.directory)
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_a_person_runs_a_program_on_this_machine_and_starts_another_from_the_console(house: DemoHouse) -> None:
    (house.home / "first.py").write_text("print('first is here')\n")
    (house.home / "second.py").write_text("import sys; print('second has', sys.argv[1:])\n")
    command = house.argv()[:-1]
    run = [*command, "run", "--host", "localhost", "--", f"{house.home}/first.py"]
    terminal = Terminal(house.directory, house.environment, run, 120, 35)
    terminal.until_it_shows("first is here", START_S)
    terminal.until_it_shows("succeeded", LOOK_S)

    terminal.keys("x")
    terminal.until_it_shows("Start another program", LOOK_S)
    terminal.key_that_marks("Down", "Start another program", LOOK_S)
    terminal.keys("Enter")
    terminal.until_it_shows("Start a program on localhost", LOOK_S)
    terminal.key_until_it_shows("C-u", "train.py --epochs 3", LOOK_S)  # what an empty field says
    terminal.tmux("send-keys", "-l", f"{house.home}/second.py 'a b'")
    terminal.until_it_shows("second.py 'a b'", LOOK_S)
    terminal.key_that_marks("Enter", "Do nothing", LOOK_S)
    terminal.key_that_marks("Right", "Start it", LOOK_S)
    terminal.keys("Enter")
    terminal.until_it_shows("second has ['a b']", START_S)
    terminal.until_it_shows("job second-", LOOK_S, "succeeded")
    terminal.keys("8")
    terminal.until_it_shows("on request: job second-", LOOK_S)

    terminal.keys("q")
    terminal.until_it_shows("exit code 0", LOOK_S)
    down = [*command, "down", "localhost", "--kill-jobs"]
    ended = subprocess.run(down, env=house.environment, capture_output=True, text=True, check=True)
    assert "no job runs" in ended.stdout


@pytest.mark.slow
def test_rankdeck_alone_in_the_directory_of_a_cluster_opens_its_console_and_programs_run_in_that_directory(
    house: DemoHouse,
) -> None:
    lab = house.home / "lab"
    lab.mkdir()
    (lab / "here.py").write_text("import os; print('it runs in', os.path.basename(os.getcwd()))\n")
    (lab / "rankdeck.toml").write_text('[cluster]\nname = "lab"\n[[node]]\nhost = "local"\nnproc = 1\n')
    command = house.argv()[:-1]
    subprocess.run([*command, "up", "localhost"], env=house.environment, capture_output=True, check=True)
    inside = ["sh", "-c", f"cd {lab} && exec {shlex.join(command)}"]
    terminal = Terminal(house.directory, house.environment, inside, 120, 35)
    terminal.until_it_shows("1 node up, no job yet", LOOK_S)  # its hint may be of ranks that another test started
    terminal.keys("x")
    terminal.until_it_shows("the inventory's, else this directory", LOOK_S)
    terminal.tmux("send-keys", "-l", "here.py")
    terminal.until_it_shows("Start here.py on localhost?", LOOK_S)
    terminal.key_that_marks("Enter", "Do nothing", LOOK_S)
    terminal.key_that_marks("Right", "Start it", LOOK_S)
    terminal.keys("Enter")
    terminal.until_it_shows("it runs in lab", START_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", LOOK_S)

    down = [*command, "down", "localhost", "--kill-jobs"]
    subprocess.run(down, env=house.environment, capture_output=True, check=True)


@pytest.mark.fault(row=31)
@pytest.mark.slow
def test_ctrl_z_goes_to_the_shell_and_fg_paints_everything_anew(house: DemoHouse) -> None:
    shell = ["env", "PS1=> ", "bash", "--norc", "-i"]
    terminal = Terminal(house.directory, house.environment, shell, 100, 24)
    terminal.tmux("send-keys", "-l", shlex.join(house.argv("--ranks", "2")))
    terminal.keys("Enter")
    terminal.until_it_shows("2 ranks training", START_S)

    terminal.keys("C-z")
    terminal.until_it_shows("Stopped", LOOK_S)
    terminal.tmux("send-keys", "-l", "clear; echo in the shell")
    terminal.keys("Enter")
    until(lambda: terminal.text().startswith("in the shell"), LOOK_S, "the screen is the shell's")
    terminal.tmux("send-keys", "-l", "fg")
    terminal.keys("Enter")

    # These lines have not changed meanwhile.
    for line in ("NODE    STATE", "RANK  NODE", "no long wait", "1-8 Views"):
        terminal.until_it_shows(line, LOOK_S)
    terminal.keys("q")
    terminal.until_it_shows("rankdeck run train.py", LOOK_S)
    end_terminals(house.directory)


@pytest.mark.fault(row=32)
@pytest.mark.slow
def test_a_closed_terminal_ends_the_demo(house: DemoHouse) -> None:
    terminal = Terminal(house.directory, house.environment, house.argv(), 80, 24)
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")

    terminal.tmux("kill-server")

    house.assert_nothing_is_left(within_s=10)
