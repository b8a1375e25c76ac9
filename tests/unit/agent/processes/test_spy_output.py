"""What py-spy prints becomes stacks; the shape is that of py-spy 0.4.3."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.processes.py_spy import MalformedOutputError, is_own, stacks_of_output
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from ddpcore.wire_stacks import MAX_FRAMES, MAX_THREADS, Frame


def a_frame(name: str, filename: str, line: int, module: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "filename": filename,
        "module": module,
        "short_filename": filename.rpartition("/")[2],
        "line": line,
        "locals": None,
        "is_entry": True,
        "is_shim_entry": False,
    }


def a_thread(tid: int, name: str | None, *frames: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": 10,
        "thread_id": 140200800200384,
        "thread_name": name,
        "os_thread_id": tid,
        "active": False,
        "owns_gil": False,
        "frames": list(frames),
        "process_info": None,
    }


def printed(*threads: dict[str, Any]) -> bytes:
    return msgspec.json.encode(list(threads))


def test_the_main_thread_comes_first_and_native_frames_are_marked() -> None:
    output = printed(
        a_thread(12, "wörker", a_frame("Condition.wait", "/usr/lib/python3.11/threading.py", 331)),
        a_thread(
            10,
            None,
            a_frame("poll", "/usr/lib/libc.so.6", 0, "/usr/lib/libc.so.6"),
            a_frame("<module>", "/work/train.py", 4),
        ),
    )

    stacks, num_left_out = stacks_of_output(output, 10)

    assert [(thread.name, thread.native_id) for thread in stacks] == [("", 10), ("wörker", 12)]
    assert stacks[0].frames == [
        Frame("/usr/lib/libc.so.6", 0, "poll", is_native=True),
        Frame("/work/train.py", 4, "<module>", is_own=True),
    ]
    assert not stacks[1].frames[0].is_own
    assert num_left_out == 0


def test_what_is_too_much_is_cut_and_counted() -> None:
    deep = a_thread(10, "n" * 1000, *(a_frame("f" * 1000, "/" + "x" * 9000, 2**50) for _ in range(MAX_FRAMES + 5)))
    others = [a_thread(tid, "t") for tid in range(11, 11 + MAX_THREADS + 2)]

    stacks, num_left_out = stacks_of_output(printed(deep, *others), 10)

    assert (len(stacks), num_left_out) == (MAX_THREADS, 3)
    assert (len(stacks[0].name), len(stacks[0].frames), stacks[0].is_cut) == (256, MAX_FRAMES, True)
    frame = stacks[0].frames[0]
    assert (len(frame.file), len(frame.function), frame.line) == (4096, 256, 2**31)


@pytest.mark.parametrize("output", [b"", b"[]", b"{}", b"[1]", b'[{"frames": 3}]', b"\xff", b"[" * 5000])
def test_anything_else_is_refused(output: bytes) -> None:
    with pytest.raises(MalformedOutputError, match=r"it (printed no stacks|saw no thread)"):
        stacks_of_output(output, 10)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/work/train.py", True),
        ("train.py", True),
        (f"{LAUNCH_PLUGIN_DIR.parent}/examples/bytegpt.py", True),
        (f"{LAUNCH_PLUGIN_DIR.parent}/engine/loop.py", False),
        ("/opt/conda/lib/python3.12/site-packages/torch/_tensor.py", False),
        ("/usr/lib/python3/dist-packages/numpy/a.py", False),
        ("/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", False),
        ("/usr/lib/python311.zip/threading.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_the_users_own_files_are_told_from_installed_ones(file: str, is_users: bool) -> None:
    assert is_own(file) == is_users
