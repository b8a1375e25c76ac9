"""A program on another machine gets exactly the arguments it was meant to get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import AppError, UsageError
from app.inspect.inspector import HostLooks, look_at_host
from app.inspect.outside_view import Target
from app.inspect.signals import send_signal
from app.install.installer import Installer, Plan
from app.install.own_wheel import OwnWheel
from app.install.wheels import Wheel
from app.ssh.remote_command import Finished, command_line, python_command

ARGUMENTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        st.text("'\"\\$`!*?~#&|;<>(){}[] \n\t-=a"),
        st.binary(max_size=8).map(lambda chunk: os.fsdecode(chunk.replace(b"\0", b""))),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("shell", [name for name in ("sh", "bash", "dash") if shutil.which(name)])
@settings(max_examples=60)
@given(arguments=ARGUMENTS)
@example(arguments=["", "~", "$(id)", "a'b\"c", "\\", "\n", "--", "-c"])
def test_every_argument_arrives_byte_for_byte(shell: str, arguments: list[str]) -> None:
    line = command_line([shutil.which("printf") or "printf", "%s\\0", *arguments])

    done = subprocess.run([shell, "-c", os.fsencode(line)], capture_output=True, check=True)

    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(argument) for argument in arguments]


def test_a_program_below_the_home_is_found_there_and_nowhere_else() -> None:
    assert command_line(["~/my env/bin/python", "~/x"]) == """exec "$HOME"'/my env/bin/python' '~/x'"""


def test_a_nul_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(UsageError, match="NUL"):
        command_line(["python", "a\0b"])


def test_a_bang_is_outside_of_quotes_for_csh() -> None:
    assert command_line(["python", "a!b"]) == r"exec python 'a'\!'b'"


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=10)
@given(text=TEXTS, argument=TEXTS, rest=st.binary(max_size=99))
def test_a_source_arrives_by_standard_input_with_what_follows_it(text: str, argument: str, rest: bytes) -> None:
    source = f"import sys\nout = sys.stdout.buffer\nout.write({text!r}.encode() + b'\\0' + sys.argv[1].encode())\n"
    command, begin = python_command(f"{source}out.write(b'\\0' + sys.stdin.buffer.read())\n", argument)

    done = subprocess.run([sys.executable, *command], input=begin + rest, capture_output=True, check=True)

    assert done.stdout == text.encode() + b"\0" + argument.encode() + b"\0" + rest


class Recording:
    """A host whose Python answers nothing of use, and the command lines that it got."""

    host, python = "h1", "~/venv/bin/python"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run_python(self, arguments: list[str], *_: Any) -> Finished:
        self.lines.append(command_line([self.python, *arguments]))
        return Finished(0, b"Linux x86_64 /usr/bin/py-spy", "")

    def open_python(self, arguments: list[str]) -> Any:
        self.run_python(arguments)
        raise OSError


def test_no_command_for_a_host_has_a_line_end_or_a_long_word() -> None:
    link: Any = Recording()
    plan = Plan(OwnWheel(Wheel("/x.whl", "rankdeck", "1", frozenset(), frozenset(), frozenset()), "digest"))
    for ask in (
        lambda: look_at_host(link, "/usr/bin/py-spy", 1, 0.0),
        lambda: HostLooks(link).run(print),
        lambda: send_signal([link], [Target("h1", 1, 2, 3, 0, is_stopped=False)], 15),
        lambda: Installer(link, plan, print).install(),
    ):
        num_before = len(link.lines)
        with suppress(AppError, OSError):
            ask()
        assert len(link.lines) > num_before
    assert not [line for line in link.lines if "\n" in line or len(line) > 1024]  # the limit of an old csh
