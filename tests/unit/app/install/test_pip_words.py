"""What pip says when it fails becomes one sentence with what to do. The lines are pip's own, versions 23.2 and 26.0."""

from __future__ import annotations

import pytest

from app.install.wheels import clash, error_line_of, failure

UNREACHABLE = (
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken "
    "by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f6d>: Failed to establish a "
    "new connection: [Errno -3] Temporary failure in name resolution')': /simple/click/"
)
NO_CLICK = "ERROR: No matching distribution found for click>=8.2"


@pytest.mark.parametrize(
    ("lines", "wheelhouse", "what", "hint"),
    [
        ([UNREACHABLE, NO_CLICK], "", "reaches no package index", "rankdeck install h1 --wheelhouse DIR"),
        ([NO_CLICK], "", "finds no click>=8.2 in its package index", "rankdeck install h1 --wheelhouse DIR"),
        ([NO_CLICK], "wheels", "wheels has no click>=8.2 that fits that Python", "add it"),
        (
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
            "",
            "no space",
            "",
        ),
        (["OSError: [Errno 122] Disk quota exceeded"], "", "no space is left", "make room"),
        (["error: externally-managed-environment", "", "This environment is"], "", "PEP 668", "--venv"),
        (["ERROR: Could not find an activated virtualenv (required)."], "", "PIP_REQUIRE_VIRTUALENV", "--python"),
        (
            [
                "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/opt/py'",
                "Check the",
            ],
            "",
            "may not be written: Could not install packages due to an OSError: [Errno 13] Permission denied: '/opt/py'",
            "--venv DIR",
        ),
        (["ERROR: ResolutionImpossible: for help visit https://pip.pypa.io"], "", "does not go with", "--venv DIR"),
        (["Processing", "ERROR: broken \x1b[2J", "at the end", ""], "", r"pip fails there: broken \x1b[2J", ""),
        ([], "", "pip fails there: it prints nothing", ""),
    ],
)
def test_a_failure_is_said_with_what_to_do(lines: list[str], wheelhouse: str, what: str, hint: str) -> None:
    said, remedy = failure(lines, "h1", wheelhouse)

    assert what in said
    assert hint in remedy
    assert "\x1b" not in said


def test_the_last_error_counts_and_without_one_the_last_line() -> None:
    assert error_line_of(["ERROR: first", "ERROR: second", "more"]) == "second"
    assert error_line_of(["one", "two", " "]) == "two"
    assert error_line_of(["ERROR: Exception:", "Traceback (most recent call last):", "OSError: odd"]) == "OSError: odd"


def test_what_the_result_does_not_suit_is_told() -> None:
    lines = [
        "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
        "old-tool 1.0 requires click<8, but you have click 8.5.1 which is incompatible.",
        "Successfully installed click-8.5.1",
    ]

    assert clash(lines) == "old-tool 1.0 requires click<8, but you have click 8.5.1 which is incompatible."
    assert clash(lines[2:]) == ""
