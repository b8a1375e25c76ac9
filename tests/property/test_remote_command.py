"""A program on another machine gets exactly the arguments it was meant to get."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import UsageError
from app.ssh.remote_command import command_line

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
