"""Whatever stands where py-spy should: it is found, read within bounds, and never waited for too long."""

from __future__ import annotations

import asyncio
import site
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from agent.processes import py_spy
from agent.processes.py_spy import MAX_OUTPUT_BYTES, PySpy, SpyError, find_py_spy
from agent.processes.worker_sampler import kernel_facts
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from pathlib import Path

SEEN = '[{"thread_name": null, "os_thread_id": 7, "frames": [{"name": "f", "filename": "/a.py", "line": 3}]}]'


def program(directory: Path, body: str) -> str:
    """Return an executable that takes py-spy's place."""
    path = directory / "py-spy"
    path.write_text(f"#!{sys.executable} -IS\n{body}\n")
    path.chmod(0o700)
    return str(path)


async def dumped(executable: str, within_s: float = 20.0, *, is_native: bool = False, pid: int = 7) -> list[str]:
    spy = PySpy()
    deadline_s = asyncio.get_running_loop().time() + within_s
    try:
        threads, _ = await spy.dump(executable, pid, is_native=is_native, deadline_s=deadline_s)
    finally:
        assert spy.pids == set()
    return [frame.function for thread in threads for frame in thread.frames]


async def test_it_is_asked_not_to_stop_the_process_unless_native_frames_are_wanted(tmp_path: Path) -> None:
    body = f"import sys\nassert sys.argv[1:] == ['dump', '--json', '--nonblocking', '--pid', '7']\nprint({SEEN!r})"
    assert await dumped(program(tmp_path, body)) == ["f"]

    native = program(tmp_path, body.replace("--nonblocking", "--native"))
    assert await dumped(native, is_native=True) == ["f"]


async def test_what_moved_under_it_is_looked_at_again(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    body = f"""
import sys
with open({str(tries)!r}, "a+") as file:
    file.write("x")
    file.seek(0)
    if len(file.read()) < 3:
        sys.exit("Error: it moved")
print({SEEN!r})
"""
    assert await dumped(program(tmp_path, body)) == ["f"]
    assert tries.read_text() == "xxx"


FAILURES = {
    "it says why": (
        "import sys\nsys.exit('Error: Failed\\n\\nCaused by:\\n    0: no way\\n\\nStack backtrace:\\n   0: x')",
        r"py-spy: Failed \(no way\)",
    ),
    "it says nothing": ("import sys\nsys.exit(3)", "py-spy: it failed without a word"),
    "it prints something else": ("print('hello')", "py-spy: it printed no stacks: .*"),
    "it prints for ever": ("while True: print('[' * 65536)", f"py-spy printed more than {MAX_OUTPUT_BYTES >> 20} MiB"),
    "it talks for ever": ("import sys\nwhile True: sys.stderr.write('x' * 65536)", "py-spy took too long"),
}


@pytest.mark.parametrize(("body", "words"), FAILURES.values(), ids=FAILURES)
async def test_its_failure_is_one_line(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(SpyError, match=f"^{words}$"):
        await dumped(program(tmp_path, body), within_s=3.0 if "long" in words else 20.0)


async def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    began_s = time.monotonic()

    with pytest.raises(SpyError, match="py-spy took too long"):
        await dumped(program(tmp_path, "import time\ntime.sleep(600)"), within_s=0.5)

    assert time.monotonic() - began_s < 60


async def test_a_process_goes_on_that_one_has_stopped_and_not_let_go(tmp_path: Path) -> None:
    stops = "import os, signal, sys, time\nos.kill(int(sys.argv[-1]), signal.SIGSTOP)\ntime.sleep(600)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    try:
        executable = program(tmp_path, stops)
        with pytest.raises(SpyError, match="py-spy took too long"):
            await dumped(executable, within_s=1.0, is_native=True, pid=process.pid)

        await until_async(lambda: (found := kernel_facts(process.pid)) and not found.is_stopped, 30.0, "it goes on")
    finally:
        process.kill()
        await process.wait()


async def test_one_that_does_not_start_is_said(tmp_path: Path) -> None:
    path = tmp_path / "py-spy"
    path.touch(mode=0o600)

    with pytest.raises(SpyError, match="py-spy does not start: Permission denied"):
        await dumped(str(path))


def test_it_is_looked_for_beside_the_agent_and_the_job_then_where_pip_puts_it_then_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("agent", "job", "target/bin", "user/bin", "path")]
    for place in places:
        place.mkdir(parents=True)
        (place / "python").touch(mode=0o700)
        program(place, "")
    agent, job, target, user, path = places
    monkeypatch.setattr(sys, "path", [*sys.path, str(target.parent)])
    monkeypatch.setattr(site, "getuserbase", lambda: str(user.parent))
    monkeypatch.setattr(sys, "executable", str(agent / "python"))
    monkeypatch.setenv("PATH", str(path))
    python = str(job / "python")

    for place in places:
        assert find_py_spy(python) == str(place / "py-spy")
        (place / "py-spy").unlink()
    assert find_py_spy(python) is None
    assert find_py_spy("/nowhere/python") is None


async def test_a_directory_that_does_not_answer_keeps_one_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, spy, began = threading.Event(), PySpy(), list[str]()

    def hang(_: str) -> None:
        began.append(threading.current_thread().name)
        is_over.wait(60)

    monkeypatch.setattr(py_spy, "find_py_spy", hang)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await spy.find("/dead/python", 0.05)
    is_over.set()
    assert began == ["rankdeck-py-spy"]
